"""The columns of resources and events by kind, as paths in documents."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from weft.documents.resource_kinds import ResourceKind
from weft_app.cli.output import Column, Listing, custom_columns, value_at

Document = dict[str, Any]
SKILLS = ("text", "image", "audio", "tools")
_WINDOWS = {"second": "sec", "minute": "min"}


def shown_state(model: Document) -> str:
    """Returns a model's state in one word: the phase of its engine if its runner is active, such as "ready"."""
    state, instance = str(model["status"]["state"]), model["status"].get("instance")
    return str(instance["phase"]) if instance and state == "active" else state


def upstream_of(model: Document) -> str:
    """Returns a model's file, or its name on its server or provider."""
    provider = model.get("provider")
    own_name = "" if provider is None else model["name"]
    return (provider or {}).get("upstreamModel") or model.get("upstream") or own_name


def skills_of(model: Document) -> list[str]:
    """Returns a model's declared or else reported skills, without those that its engine lacks.

    As `weft.kernel.requests.capabilities.reported_over`.
    """
    reported = value_at(model, "status.instance.abilities") or {}
    found = model.get("skills") or reported.get("skills", ())
    return [skill for skill in SKILLS if skill in found and skill not in reported.get("lacking", ())]


def who_wakes(model: Document) -> list[str]:
    """Returns who wakes a hibernating model, such as "mesh:wake_on_lan", without recipes, which may contain secrets."""
    wake = model.get("wake", {})
    recipe = wake.get("byMesh")
    return [*(["runner"] if wake.get("byRunner") else []), *([f"mesh:{recipe['type']}"] if recipe else [])]


def slots(instances: Iterable[Document | None]) -> str:
    """Returns used and total slots of several instances."""
    known = [each for each in instances if each]
    return f"{sum(each['slotsUsed'] for each in known)}/{sum(each['slotsTotal'] for each in known)}"


def limit_words(limit: Document) -> str:
    """Returns a limit as text, such as "100 req/min per key for llama-*"."""
    window = _WINDOWS.get(limit["window"], limit["window"])
    amounts = [
        f"{limit[name]} {unit}/{window}" for name, unit in (("requests", "req"), ("tokens", "tok")) if name in limit
    ]
    subject = f" per {limit['per']}" if "per" in limit else ""
    return " and ".join(amounts) + subject + (f" for {limit['model']}" if limit.get("model") else "")


def limits_text(tenant: Document) -> str:
    """Returns the limits of a tenant as text."""
    return "none" if tenant.get("unlimited") else ", ".join(map(limit_words, tenant.get("limits", ()))) or "default"


def _used(tenant: Document) -> str:
    from weft_app.cli.records import used_text  # noqa: PLC0415 - of tenants alone

    return used_text(tenant.get(USES, ()))


def without_heartbeat(document: Document) -> Document:
    """Returns a resource without the time of its last heartbeat."""
    status = {name: value for name, value in document["status"].items() if name != "lastHeartbeatAt"}
    return document | {"status": status}


def graph_bytes(workflow: Document) -> int:
    """Returns the length of a workflow's graph as JSON."""
    return len(json.dumps(workflow["graph"], separators=(",", ":"), ensure_ascii=False).encode())


def event_label(event: Document) -> str:
    """Returns the subject of an event as KIND/NAME."""
    return f"{event['resourceKind']}/{event['resourceName']}"


USES = "uses"
"""Key of the limit usage of tenants in documents shown as a table."""
_AGE = "AGE:status.createdAt:age~"
_SHORT, _WHOLE = "DESCRIPTION:description:short", "DESCRIPTION:description"
_MODEL = custom_columns(
    "NAME:name POOL:poolName? SOURCE:status.kind:source? STATUS RUNTIME:status.type TIER:tier? RUNNER:status.runner "
    "OPERATIONS:operations:commas? CONTEXT:contextTokens|status.instance.contextTokens",
    STATUS=shown_state,
)
_MODEL_WIDE = _MODEL + custom_columns(
    "MODEL KEY:provider.apiKeyRef OWNER:owner LABELS:labels:labels ID:status.id ADAPTS:status.instance.baseModel SLOTS "
    f"REMOTE:remote SKILLS WAKE HEARTBEAT:status.lastHeartbeatAt:ago~ {_AGE} DIGEST:digest",
    MODEL=upstream_of,
    SLOTS=lambda model: slots([model["status"].get("instance")]),
    SKILLS=lambda model: ",".join(skills_of(model)),
    WAKE=lambda model: ",".join(who_wakes(model)),
)
_AGENT = custom_columns(
    f"NAME:name SOURCE:status.kind:source STATUS:status.state MODEL {_SHORT}",
    MODEL=lambda agent: f"pool/{agent['pool']}" if agent.get("pool") else agent.get("model"),
)
_AGENT_WIDE = _AGENT[:-1] + custom_columns(
    "TIER:tier OWNER:owner LABELS:labels:labels ID:status.id RUNNER:status.runner TOOLS:tools:commas "
    f"SIGNALS:signals:commas {_AGE} {_WHOLE}"
)
_RUNNER = custom_columns(
    "NAME:name STATUS:status.state LINK:status.link? HOST:status.host RUNTIME:status.runtime? MODELS SLOTS "
    "HEARTBEAT:status.lastHeartbeatAt:ago~",
    MODELS=lambda runner: ",".join(each["model"] for each in runner["status"]["instances"]),
    SLOTS=lambda runner: slots(runner["status"]["instances"]),
)
_RUNNER_WIDE = _RUNNER + custom_columns(
    "VERSION:status.version DRAINING:status.draining LABELS:status.labels:labels ADDRESS:status.address"
)
_POOL = custom_columns("NAME:name MEMBERS:status.size ACTIVE:status.activeCount NAMED:status.explicit")
_POOL_WIDE = _POOL + custom_columns("MODELS:members:commas")
_ROUTE = custom_columns(
    f"NAME:name STATUS:status.state CANDIDATES:candidates:short BUDGET:budgetSeconds:{{:g}}s {_SHORT}"
)
_ROUTE_WIDE = custom_columns(
    "NAME:name STATUS:status.state CANDIDATES:candidates:commas BUDGET:budgetSeconds:{:g}s KEEP:keepAlive:keep "
    f"PINNED:pinPrimary LABELS:labels:labels ID:status.id {_AGE} {_WHOLE}"
)
_ALIAS = custom_columns("NAME:name PATTERN:pattern TARGET:target TENANT:tenant SOURCE:status.source")
_ALIAS_WIDE = _ALIAS + custom_columns(f"{_AGE} {_WHOLE}")
_WORKFLOW = custom_columns(
    f"NAME:name STATUS:status.state MODEL:model INPUTS {_SHORT}",
    INPUTS=lambda workflow: ",".join(each["name"] for each in workflow.get("inputs", ())),
)
_WORKFLOW_WIDE = _WORKFLOW[:-1] + custom_columns(
    f"OUTPUTS:outputs:commas BYTES {_AGE} {_WHOLE}", BYTES=lambda workflow: str(graph_bytes(workflow))
)
_TENANT = custom_columns(
    "NAME:name WEIGHT LIMITS USED SOURCE:status.source",
    WEIGHT=lambda tenant: f"{tenant.get('weight', 1.0):g}",
    LIMITS=limits_text,
    USED=_used,
)
_TENANT_WIDE = (
    *_TENANT[:2],
    *custom_columns(
        "MAX_RUNNING:maxInFlight MAX_PRIORITY REMOTE CAPTURE",
        MAX_PRIORITY=lambda tenant: tenant.get("maxPriority", "high"),
        REMOTE=lambda tenant: tenant.get("allowRemote", "on_request"),
        CAPTURE=lambda tenant: "yes" if tenant.get("capture") else "no",
    ),
    *_TENANT[2:],
    *custom_columns(f"{_AGE} {_WHOLE}"),
)
_TRIAL = custom_columns(
    f"NAME:name CANDIDATE:candidate AGAINST:against TENANT:tenant SHARE PAIRS:maxPairs {_SHORT}",
    SHARE=lambda trial: f"{trial['sharePercent']:g} %",
)
_TRIAL_WIDE = _TRIAL[:-1] + custom_columns(f"ALIAS:alias {_AGE} {_WHOLE}")
_EVENT = (
    Column("TIME", "time", "local", min_chars=19),
    Column("RESOURCE", event_label, min_chars=20),
    Column("REASON", "reason", min_chars=10, is_minor=True),
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
    """Returns the declared part of a resource as YAML: without `status` and default values."""
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
            "there are no runners yet; weft up starts those in weft.yaml, weft runner join adds a machine",
            _RUNNER,
            _RUNNER_WIDE,
        ),
        (
            ResourceKind.POOL,
            "there are no pools; they are created by models, and there are none yet",
            _POOL,
            _POOL_WIDE,
        ),
        (ResourceKind.ROUTE, f"there are no routes{_APPLY}", _ROUTE, _ROUTE_WIDE),
        (ResourceKind.ALIAS, f"there are no aliases{_APPLY}", _ALIAS, _ALIAS_WIDE),
        (ResourceKind.WORKFLOW, f"there are no workflows{_APPLY}", _WORKFLOW, _WORKFLOW_WIDE),
        (ResourceKind.TENANT, f"no tenant is declared or configured{_APPLY}", _TENANT, _TENANT_WIDE),
        (ResourceKind.TRIAL, f"there are no trials{_APPLY}", _TRIAL, _TRIAL_WIDE),
    )
}


@cache
def listing_of(kind: ResourceKind) -> Listing:
    """Returns the listing of a kind, with columns from its fields if it has none here."""
    if kind in _LISTINGS:
        return _LISTINGS[kind]
    from weft.documents.kinds import KINDS  # noqa: PLC0415 - it needs protobuf

    declared: Any = KINDS[kind].declared.DESCRIPTOR
    texts = [each for each in declared.fields if each.cpp_type != each.CPPTYPE_MESSAGE and not each.is_repeated]
    columns = (
        Column("NAME", "name"),
        *(Column(each.name.replace("_", " ").upper(), each.camelcase_name) for each in texts if each.name != "name"),
        *custom_columns(_AGE),
    )
    return _listing(kind, f"there are no {kind.plural}{_APPLY}", columns, columns)


MIXED = Listing(columns=(), name=label_of, kind="List", yaml=declared_yaml, plural="resources")
"""Resources of several kinds, as documents."""


def labelled_listing(kind: ResourceKind) -> Listing:
    """Returns the listing of a kind with KIND/NAME as the name, for several kinds together."""
    listing, name = listing_of(kind), Column("NAME", label_of)
    return replace(listing, columns=(name, *listing.columns[1:]), wide=(name, *listing.wide[1:]))
