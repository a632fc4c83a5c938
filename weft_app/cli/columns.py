"""How resources and events are listed: the columns of each kind, as paths in documents."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from weft.documents.resource_kinds import ResourceKind
from weft_app.cli.formats import value_at
from weft_app.cli.output import Column, Listing

Document = dict[str, Any]
SKILLS = ("text", "image", "audio", "tools")
_WINDOWS = {"second": "sec", "minute": "min"}
_DECLARED_BY_PROFILES = ("models", "agents", "routes", "aliases")


def shown_state(model: Document) -> str:
    """Returns the state of a model in one word: the phase of its engine while its runner is there, such as "ready"."""
    state, instance = str(model["status"]["state"]), model["status"].get("instance")
    return str(instance["phase"]) if instance and state == "active" else state


def upstream_of(model: Document) -> str:
    """Returns what a model is outside the mesh: its file, or the name that its server or provider has for it."""
    provider = model.get("provider")
    own_name = "" if provider is None else model["name"]
    return (provider or {}).get("upstreamModel") or model.get("upstream") or own_name


def skills_of(model: Document) -> list[str]:
    """Returns what a model takes: what is declared of it, else what its runner reports, without what its engine lacks.

    As `weft.kernel.abilities.reported_over`.
    """
    reported = value_at(model, "status.instance.abilities") or {}
    found = model.get("skills") or reported.get("skills", ())
    return [skill for skill in SKILLS if skill in found and skill not in reported.get("lacking", ())]


def who_wakes(model: Document) -> list[str]:
    """Who wakes a hibernating model, such as "mesh:wake_on_lan"; recipes themselves may hold secrets."""
    wake = model.get("wake", {})
    recipe = wake.get("byMesh")
    return [*(["runner"] if wake.get("byRunner") else []), *([f"mesh:{recipe['type']}"] if recipe else [])]


def slots(instances: Iterable[Document | None]) -> str:
    """Returns used and total slots of several instances."""
    known = [each for each in instances if each]
    return f"{sum(each['slotsUsed'] for each in known)}/{sum(each['slotsTotal'] for each in known)}"


def limit_words(limit: Document) -> str:
    """A limit as text, such as "100 req/min per key for llama-*"."""
    window = _WINDOWS.get(limit["window"], limit["window"])
    amounts = [
        f"{limit[name]} {unit}/{window}" for name, unit in (("requests", "req"), ("tokens", "tok")) if name in limit
    ]
    subject = f" per {limit['per']}" if "per" in limit else ""
    return " and ".join(amounts) + subject + (f" for {limit['model']}" if limit.get("model") else "")


def limits_text(tenant: Document) -> str:
    """The limits of a tenant as text."""
    return "none" if tenant.get("unlimited") else ", ".join(map(limit_words, tenant.get("limits", ()))) or "default"


def _used(tenant: Document) -> str:
    from weft_app.cli.limit_uses import used_text  # noqa: PLC0415 - of tenants alone

    return used_text(tenant.get(USES, ()))


def without_heartbeat(document: Document) -> Document:
    """Returns a resource without the time of its last heartbeat."""
    status = {name: value for name, value in document["status"].items() if name != "lastHeartbeatAt"}
    return document | {"status": status}


def graph_bytes(workflow: Document) -> int:
    """Returns the length of a workflow's graph as JSON."""
    return len(json.dumps(workflow["graph"], separators=(",", ":"), ensure_ascii=False).encode())


def profile_state(profile: Document) -> str:
    """Returns whether a profile is active, and still as it says."""
    if profile["status"]["changes"]:
        return "changed"
    return "active" if profile["status"]["active"] else "inactive"


def event_label(event: Document) -> str:
    """Returns what an event is about, as KIND/NAME."""
    return f"{event['resourceKind']}/{event['resourceName']}"


USES = "uses"
"""Key of what routers count of a tenant's limits, in documents that are shown as a table."""
_STATUS, _AGE = Column("STATUS", "status.state"), Column("AGE", "status.createdAt", "age", ticks=True)
_HEARTBEAT = Column("HEARTBEAT", "status.lastHeartbeatAt", "ago", ticks=True)
_NAME, _SHORT = Column("NAME", "name"), Column("DESCRIPTION", "description", "short")
_SOURCE, _ID, _DESCRIPTION = (
    Column("SOURCE", "status.kind", "source"),
    Column("ID", "status.id"),
    Column("DESCRIPTION", "description"),
)
_TIER, _OWNER, _LABELS = Column("TIER", "tier"), Column("OWNER", "owner"), Column("LABELS", "labels", "labels")
_MODEL = (
    _NAME,
    Column("POOL", "poolName"),
    _SOURCE,
    Column("STATUS", shown_state),
    Column("RUNTIME", "status.type"),
    _TIER,
    Column("RUNNER", "status.runner"),
    Column("OPERATIONS", "operations", "commas"),
    Column("CONTEXT", "contextTokens|status.instance.contextTokens"),
)
_MODEL_WIDE = (
    *_MODEL,
    Column("MODEL", upstream_of),
    Column("KEY", "provider.apiKeyRef"),
    _OWNER,
    _LABELS,
    _ID,
    Column("ADAPTS", "status.instance.baseModel"),
    Column("SLOTS", lambda model: slots([model["status"].get("instance")])),
    Column("REMOTE", "remote"),
    Column("SKILLS", lambda model: ",".join(skills_of(model))),
    Column("WAKE", lambda model: ",".join(who_wakes(model))),
    _HEARTBEAT,
    _AGE,
    Column("DIGEST", "digest"),
)
_AGENT = (
    _NAME,
    _SOURCE,
    _STATUS,
    Column("MODEL", lambda agent: f"pool/{agent['pool']}" if agent.get("pool") else agent.get("model")),
    _SHORT,
)
_AGENT_WIDE = (
    *_AGENT[:-1],
    _TIER,
    _OWNER,
    _LABELS,
    _ID,
    Column("RUNNER", "status.runner"),
    Column("TOOLS", "tools", "commas"),
    Column("SIGNALS", "signals", "commas"),
    _AGE,
    _DESCRIPTION,
)
_RUNNER = (
    _NAME,
    _STATUS,
    Column("LINK", "status.link"),
    Column("HOST", "status.host"),
    Column("RUNTIME", "status.runtime"),
    Column("MODELS", lambda runner: ",".join(each["model"] for each in runner["status"]["instances"])),
    Column("SLOTS", lambda runner: slots(runner["status"]["instances"])),
    _HEARTBEAT,
)
_RUNNER_WIDE = (
    *_RUNNER,
    Column("VERSION", "status.version"),
    Column("DRAINING", "status.draining"),
    Column("ADDRESS", "status.address"),
)
_POOL = (
    _NAME,
    Column("MEMBERS", "status.size"),
    Column("ACTIVE", "status.activeCount"),
    Column("NAMED", "status.explicit"),
)
_ROUTE = (
    _NAME,
    _STATUS,
    Column("CANDIDATES", "candidates", "short"),
    Column("BUDGET", "budgetSeconds", "{:g}s"),
    _SHORT,
)
_ROUTE_WIDE = (
    *_ROUTE[:2],
    Column("CANDIDATES", "candidates", "commas"),
    _ROUTE[3],
    Column("KEEP", "keepAlive", "keep"),
    Column("PINNED", "pinPrimary"),
    _ID,
    _AGE,
    _DESCRIPTION,
)
_ALIAS = (
    _NAME,
    Column("PATTERN", "pattern"),
    Column("TARGET", "target"),
    Column("TENANT", "tenant"),
    Column("SOURCE", "status.source"),
)
_PROFILE = (
    _NAME,
    Column("STATUS", profile_state),
    Column("LOADS", lambda profile: ",".join(each["model"] for each in profile["load"])),
    Column("DOCUMENTS", lambda profile: str(sum(len(profile.get(kind, ())) for kind in _DECLARED_BY_PROFILES))),
    _SHORT,
)
_PROFILE_WIDE = (
    *_PROFILE[:-1],
    Column("UNLOADS", lambda profile: "others" if profile["unloadOthers"] else ",".join(profile["unload"])),
    Column("ACTIVE", "status.activeSince", "age", ticks=True),
    _AGE,
    _DESCRIPTION,
)
_WORKFLOW = (
    _NAME,
    _STATUS,
    Column("MODEL", "model"),
    Column("INPUTS", lambda workflow: ",".join(each["name"] for each in workflow.get("inputs", ()))),
    _SHORT,
)
_WORKFLOW_WIDE = (
    *_WORKFLOW[:-1],
    Column("OUTPUTS", "outputs", "commas"),
    Column("BYTES", lambda workflow: str(graph_bytes(workflow))),
    _AGE,
    _DESCRIPTION,
)
_TENANT = (
    _NAME,
    Column("WEIGHT", lambda tenant: f"{tenant.get('weight', 1.0):g}"),
    Column("LIMITS", limits_text),
    Column("USED", _used),
    Column("SOURCE", "status.source"),
)
_TENANT_WIDE = (
    *_TENANT[:2],
    Column("MAX RUNNING", "maxInFlight"),
    Column("REMOTE", lambda tenant: tenant.get("allowRemote", "on_request")),
    *_TENANT[2:],
    _AGE,
    _DESCRIPTION,
)


_EVENT = (
    Column("TIME", "time", "local", min_chars=19),
    Column("RESOURCE", event_label, min_chars=20),
    Column("REASON", "reason", min_chars=10),
    Column("MESSAGE", "message"),
)


def label_of(document: Document) -> str:
    """Returns a resource as KIND/NAME."""
    return f"{document['kind']}/{document['name']}"


def yaml_of(document: Document) -> str:
    """Returns a document as YAML."""
    from weft.documents.yaml_documents import yaml_text  # noqa: PLC0415 - most commands print no YAML

    return yaml_text(document)


def declared_yaml(document: Document) -> str:
    """Returns what a resource declares as YAML: without `status`, and without what is as it would be anyway."""
    from weft.documents.resources import declared_of  # noqa: PLC0415 - as above

    return yaml_of(declared_of(document))


EVENTS = Listing(
    empty="nothing has happened yet",
    columns=_EVENT,
    wide=_EVENT,
    name=event_label,
    yaml=yaml_of,
    plural="events",
)


def _listing(kind: ResourceKind, empty: str, columns: Sequence[Column], wide: Sequence[Column]) -> Listing:
    return Listing(
        empty=empty,
        columns=columns,
        wide=wide,
        name=label_of,
        kind=kind.list_kind,
        document=lambda document: {key: value for key, value in document.items() if key != USES},
        lasting=without_heartbeat,
        yaml=declared_yaml,
        plural=kind.plural,
    )


_NO_MODELS = "there are no models yet; weft load hf:OWNER/REPO adds one"
NOTHING = f"the mesh is empty: {_NO_MODELS}"
_APPLY = "; weft apply -f FILE declares them"
_LISTINGS: Mapping[ResourceKind, Listing] = {
    kind: _listing(kind, empty, columns, wide)
    for kind, empty, columns, wide in (
        (ResourceKind.MODEL, _NO_MODELS, _MODEL, _MODEL_WIDE),
        (ResourceKind.AGENT, f"there are no agents{_APPLY}", _AGENT, _AGENT_WIDE),
        (
            ResourceKind.RUNNER,
            "no runner is known yet; weft up starts those of weft.yaml, weft runner join adds a machine",
            _RUNNER,
            _RUNNER_WIDE,
        ),
        (
            ResourceKind.POOL,
            "there are no pools; they follow from models, and there are none yet",
            _POOL,
            (*_POOL, Column("MODELS", "members", "commas")),
        ),
        (ResourceKind.ROUTE, f"there are no routes{_APPLY}", _ROUTE, _ROUTE_WIDE),
        (ResourceKind.ALIAS, f"there are no aliases{_APPLY}", _ALIAS, (*_ALIAS, _AGE, _DESCRIPTION)),
        (
            ResourceKind.PROFILE,
            "there are no profiles; weft profile save NAME makes one of what is now",
            _PROFILE,
            _PROFILE_WIDE,
        ),
        (ResourceKind.WORKFLOW, f"there are no workflows{_APPLY}", _WORKFLOW, _WORKFLOW_WIDE),
        (ResourceKind.TENANT, f"no tenant is declared or configured{_APPLY}", _TENANT, _TENANT_WIDE),
    )
}


@cache
def listing_of(kind: ResourceKind) -> Listing:
    """Returns how resources of a kind are listed; one without columns here has those that follow from its fields."""
    if kind in _LISTINGS:
        return _LISTINGS[kind]
    from weft.documents.kinds import KINDS  # noqa: PLC0415 - it needs protobuf

    declared: Any = KINDS[kind].declared.DESCRIPTOR
    texts = [each for each in declared.fields if each.cpp_type != each.CPPTYPE_MESSAGE and not each.is_repeated]
    columns = (
        _NAME,
        *(Column(each.name.replace("_", " ").upper(), each.camelcase_name) for each in texts if each.name != "name"),
        _AGE,
    )
    return _listing(kind, f"there are no {kind.plural}{_APPLY}", columns, columns)


MIXED = Listing(columns=(), name=label_of, kind="List", yaml=declared_yaml, plural="resources")
"""Resources of several kinds, as documents."""


def labelled_listing(kind: ResourceKind) -> Listing:
    """Returns the listing of a kind beside others: with KIND/NAME for the name."""
    listing, name = listing_of(kind), Column("NAME", label_of)
    return replace(listing, columns=(name, *listing.columns[1:]), wide=(name, *listing.wide[1:]))
