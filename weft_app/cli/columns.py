"""How resources and events are listed: the columns and documents of each kind."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from weft.api.registry.v1.agent_pb2 import Agent
from weft.api.registry.v1.event_pb2 import Event
from weft.api.registry.v1.model_pb2 import Model
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.api.registry.v1.tags_pb2 import Tags
from weft.api.registry.v1.tenant_pb2 import TenantManifest
from weft.documents.codec import document_of, word_of
from weft.documents.profiles import declarations_of
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import AnyDocument, ModelDocument, ProfileDocument, plain
from weft.kernel.abilities import skill_words
from weft.kernel.tenant_rules import limit_words
from weft_app.cli.limit_uses import used_text
from weft_app.cli.output import Column, Listing


def upstream_of(model: ModelDocument) -> str:
    """Returns what a model is outside the mesh: its file, or the name that its server or provider has for it."""
    manifest = model.manifest
    own_name = manifest.name if manifest.HasField("provider") else ""
    return manifest.provider.upstream_model or manifest.upstream or own_name


def labels_text(tags: Tags) -> str:
    """Returns labels as selectors have them: `team=a,zone=b`."""
    return ",".join(f"{key}={value}" for key, value in sorted(tags.labels.items()))


_SOURCES: Mapping[str, str] = MappingProxyType({"virtual": "runner", "public": "declared"})


def source_of(observed: Model | Agent) -> str:
    """Returns where a model or an agent comes from: `runner` publishes it, or an operator `declared` it."""
    word = word_of(observed, "kind")
    return _SOURCES.get(word, word)


_MODEL = (
    Column("NAME", "{name}"),
    Column("POOL", "{manifest.pool_name}"),
    Column("SOURCE", lambda document: source_of(document.observed)),
    Column("STATUS", "{shown_state}"),
    Column("RUNTIME", "{observed.type}"),
    Column("TIER", "{manifest.tags.tier}"),
    Column("RUNNER", "{observed.runner}"),
    Column("OPERATIONS", "{manifest.operations:commas}"),
    Column("CONTEXT", "[{manifest.context_tokens}|{instance.context_tokens}]"),
)
_MODEL_WIDE = (
    *_MODEL,
    Column("MODEL", upstream_of),
    Column("KEY", "{manifest.provider.api_key_ref}"),
    Column("OWNER", "{manifest.tags.owner}"),
    Column("LABELS", lambda model: labels_text(model.manifest.tags)),
    Column("ID", "{observed.id}"),
    Column("ADAPTS", lambda model: model.instance.base_model if model.instance else ""),
    Column("SLOTS", lambda model: slots([model.instance] if model.instance else [])),
    Column("REMOTE", "{manifest.remote:yes}"),
    Column("SKILLS", lambda model: ",".join(skill_words(model.abilities.skills)) or "-"),
    Column("WAKE", lambda model: ",".join(who_wakes(model))),
    Column("HEARTBEAT", "[{observed.last_heartbeat_time:ago}]", ticks=True),
    Column("AGE", "[{observed.create_time:age}]", ticks=True),
    Column("DIGEST", "{manifest.digest}"),
)
_AGENT = (
    Column("NAME", "{name}"),
    Column("SOURCE", lambda document: source_of(document.observed)),
    Column("STATUS", "{state}"),
    Column("MODEL", "[pool/{declared.pool}|{declared.model}]"),
    Column("DESCRIPTION", "{declared.description:short}"),
)
_AGENT_WIDE = (
    *_AGENT[:-1],
    Column("TIER", "{declared.tags.tier}"),
    Column("OWNER", "{declared.tags.owner}"),
    Column("LABELS", lambda agent: labels_text(agent.declared.tags)),
    Column("ID", "{observed.id}"),
    Column("RUNNER", "{observed.runner}"),
    Column("TOOLS", "[{declared.behaviour.tools:commas}]"),
    Column("SIGNALS", "[{declared.behaviour.signals:commas}]"),
    Column("AGE", "[{observed.create_time:age}]", ticks=True),
    Column("DESCRIPTION", "{declared.description}"),
)
_RUNNER = (
    Column("NAME", "{name}"),
    Column("STATUS", "{state}"),
    Column("LINK", lambda runner: document_of(runner.observed)["link"]),
    Column("HOST", "{observed.host}"),
    Column("RUNTIME", "{observed.runtime}"),
    Column("MODELS", lambda runner: ",".join(one.model for one in runner.observed.capability.instances)),
    Column("SLOTS", lambda runner: slots(runner.observed.capability.instances)),
    Column("HEARTBEAT", "[{observed.last_heartbeat_time:ago}]", ticks=True),
)
_RUNNER_WIDE = (
    *_RUNNER,
    Column("VERSION", "{observed.version}"),
    Column("DRAINING", "{observed.capability.draining:yes}"),
    Column("ADDRESS", "{observed.address}"),
)
_POOL = (
    Column("NAME", "{name}"),
    Column("MEMBERS", "{observed.size}"),
    Column("ACTIVE", "{observed.active_count}"),
    Column("NAMED", "{observed.explicit:yes}"),
)
_POOL_WIDE = (
    *_POOL,
    Column("MODELS", "[{declared.members:commas}]"),
)
_ROUTE = (
    Column("NAME", "{name}"),
    Column("STATUS", "{state}"),
    Column("CANDIDATES", "{declared.candidates:short}"),
    Column("BUDGET", "[{declared.budget:g}s]"),
    Column("DESCRIPTION", "{declared.description:short}"),
)
_ROUTE_WIDE = (
    *_ROUTE[:2],
    Column("CANDIDATES", "[{declared.candidates:commas}]"),
    _ROUTE[3],
    Column("KEEP", "[{declared.keep_alive:keep}]"),
    Column("PINNED", "{declared.pin_primary:yes}"),
    Column("ID", "{observed.id}"),
    Column("AGE", "[{observed.create_time:age}]", ticks=True),
    Column("DESCRIPTION", "{declared.description}"),
)
_ALIAS = (
    Column("NAME", "{name}"),
    Column("PATTERN", "{declared.pattern}"),
    Column("TARGET", "{declared.target}"),
    Column("TENANT", "[{declared.tenant}|-]"),
    Column("SOURCE", "{observed.source}"),
)
_ALIAS_WIDE = (
    *_ALIAS,
    Column("AGE", "[{observed.create_time:age}]", ticks=True),
    Column("DESCRIPTION", "{declared.description}"),
)


def unloads_text(profile: ProfileDocument) -> str:
    """What a switch to a profile unloads, as text."""
    return "others" if profile.declared.unload_others else ",".join(profile.declared.unload)


_PROFILE = (
    Column("NAME", "{name}"),
    Column("STATUS", lambda profile: "changed" if profile.is_changed else profile.state),
    Column("LOADS", lambda profile: ",".join(each.model for each in profile.declared.load)),
    Column("DOCUMENTS", lambda profile: str(len(declarations_of(profile.declared)))),
    Column("DESCRIPTION", "{declared.description:short}"),
)
_PROFILE_WIDE = (
    *_PROFILE[:-1],
    Column("UNLOADS", unloads_text),
    Column("ACTIVE", "[{observed.active_time:age}]", ticks=True),
    Column("AGE", "[{observed.create_time:age}]", ticks=True),
    Column("DESCRIPTION", "{declared.description}"),
)


_EVENT = (
    Column("TIME", "{time:local}", min_chars=19),
    Column("RESOURCE", "{kind}/{name}", min_chars=20),
    Column("REASON", "{reason}", min_chars=10),
    Column("MESSAGE", "{message}"),
)


def _event_yaml(event: Event) -> str:
    from weft.documents.yaml_documents import yaml_text  # noqa: PLC0415 - most commands print no YAML

    return yaml_text(document_of(event))


def _declared_yaml(document: AnyDocument) -> str:
    from weft.documents.yaml_documents import to_yaml  # noqa: PLC0415 - most commands print no YAML

    return to_yaml([document])


EVENTS = Listing(
    empty="nothing has happened yet",
    columns=_EVENT,
    wide=_EVENT,
    name=lambda event: f"{word_of(event, 'kind')}/{event.name}",
    document=document_of,
    yaml=_event_yaml,
    plural="events",
)


_WORKFLOW = (
    Column("NAME", "{name}"),
    Column("STATUS", "{state}"),
    Column("MODEL", "{declared.model}"),
    Column("INPUTS", lambda workflow: ",".join(each.name for each in workflow.declared.workflow.inputs)),
    Column("DESCRIPTION", "{declared.description:short}"),
)
_WORKFLOW_WIDE = (
    *_WORKFLOW[:-1],
    Column("OUTPUTS", lambda workflow: ",".join(workflow.declared.workflow.outputs)),
    Column("BYTES", lambda workflow: str(len(workflow.declared.workflow.graph.encode()))),
    Column("AGE", "[{observed.create_time:age}]", ticks=True),
    Column("DESCRIPTION", "{declared.description}"),
)


_TENANT = (
    Column("NAME", "{name}"),
    Column("WEIGHT", lambda tenant: f"{weight_of(tenant.declared):g}"),
    Column("LIMITS", lambda tenant: limits_text(tenant.declared)),
    Column("USED", used_text),
    Column("SOURCE", "{observed.source}"),
)
_TENANT_WIDE = (
    *_TENANT[:2],
    Column("MAX RUNNING", "[{declared.max_in_flight}|-]"),
    Column("REMOTE", lambda tenant: remote_text(tenant.declared)),
    *_TENANT[2:],
    Column("AGE", "[{observed.create_time:age}]", ticks=True),
    Column("DESCRIPTION", "{declared.description}"),
)


def weight_of(tenant: TenantManifest) -> float:
    """A tenant's share of scarce capacity, relative to the other tenants'."""
    return tenant.weight if tenant.HasField("weight") else 1.0


def remote_text(tenant: TenantManifest) -> str:
    """Returns the word for whether a tenant's requests may leave the premises."""
    return word_of(tenant, "allow_remote") if tenant.allow_remote else "on_request"


def limits_text(tenant: TenantManifest) -> str:
    """The limits of a tenant as text."""
    if tenant.unlimited:
        return "none"
    return ", ".join(map(limit_words, tenant.limits)) or "default"


_EMPTY: Mapping[ResourceKind, str] = {
    ResourceKind.MODEL: "there are no models yet; weft load hf:OWNER/REPO adds one",
    ResourceKind.AGENT: "there are no agents; weft apply -f FILE declares them",
    ResourceKind.RUNNER: "no runner is known yet; weft up starts those of weft.yaml, weft runner join adds a machine",
    ResourceKind.POOL: "there are no pools; they follow from models, and there are none yet",
    ResourceKind.ROUTE: "there are no routes; weft apply -f FILE declares them",
    ResourceKind.ALIAS: "there are no aliases; weft apply -f FILE declares them",
    ResourceKind.WORKFLOW: "there are no workflows; weft apply -f FILE declares them",
    ResourceKind.TENANT: "no tenant is declared or configured; weft apply -f FILE declares them",
    ResourceKind.PROFILE: "there are no profiles; weft profile save NAME makes one of what is now",
}
NOTHING = f"the mesh is empty: {_EMPTY[ResourceKind.MODEL]}"


def _listing(kind: ResourceKind, columns: Sequence[Column], wide: Sequence[Column]) -> Listing:
    return Listing(
        empty=_EMPTY[kind],
        columns=columns,
        wide=wide,
        name=lambda document: document.label,
        kind=kind.list_kind,
        document=plain,
        yaml=_declared_yaml,
        plural=kind.plural,
    )


RESOURCES: Mapping[ResourceKind, Listing] = {
    kind: _listing(kind, columns, wide)
    for kind, columns, wide in (
        (ResourceKind.MODEL, _MODEL, _MODEL_WIDE),
        (ResourceKind.AGENT, _AGENT, _AGENT_WIDE),
        (ResourceKind.RUNNER, _RUNNER, _RUNNER_WIDE),
        (ResourceKind.POOL, _POOL, _POOL_WIDE),
        (ResourceKind.ROUTE, _ROUTE, _ROUTE_WIDE),
        (ResourceKind.ALIAS, _ALIAS, _ALIAS_WIDE),
        (ResourceKind.PROFILE, _PROFILE, _PROFILE_WIDE),
        (ResourceKind.WORKFLOW, _WORKFLOW, _WORKFLOW_WIDE),
        (ResourceKind.TENANT, _TENANT, _TENANT_WIDE),
    )
}


MIXED = Listing(
    columns=(),
    name=lambda document: document.label,
    kind="List",
    document=plain,
    yaml=_declared_yaml,
    plural="resources",
)
"""Resources of several kinds, as documents."""


def labelled_listing(kind: ResourceKind) -> Listing:
    """Returns the listing of a kind beside others: with KIND/NAME for the name."""
    listing = RESOURCES[kind]
    name = Column("NAME", lambda document: document.label)
    return replace(listing, columns=(name, *listing.columns[1:]), wide=(name, *listing.wide[1:]))


def who_wakes(model: ModelDocument) -> list[str]:
    """Who wakes a hibernating model, such as "mesh:wake_on_lan"; recipes themselves may hold secrets."""
    wake = model.manifest.wake
    who = ["runner"] if wake.by_runner else []
    return [*who, f"mesh:{wake.by_mesh.WhichOneof('action')}"] if wake.HasField("by_mesh") else who


def slots(instances: Sequence[InstanceState]) -> str:
    """Returns used and total slots of several instances."""
    return f"{sum(one.slots_used for one in instances)}/{sum(one.slots_total for one in instances)}"
