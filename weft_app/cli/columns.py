"""How resources and events are listed: the columns and documents of each kind."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from weft.api.registry.v1.agent_pb2 import AgentManifest
from weft.api.registry.v1.event_pb2 import Event
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.documents.codec import document_of, moment_of, seconds_of, word_of
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import ModelDocument, plain
from weft.documents.yaml_documents import to_yaml, yaml_text
from weft_app.cli.output import Column, Listing, local_time, seconds_ago

MAX_DESCRIPTION_CELL_CHARS = 60
_USELESS = frozenset({"failed", "crash-loop"})


def _state_of(model: ModelDocument) -> str:
    """Returns the state of a model, or of its instance where the runner is live and the model takes no requests."""
    phase = word_of(model.instance, "phase") if model.instance is not None else ""
    return phase if model.state == "active" and phase in _USELESS else model.state


def _target_of(manifest: AgentManifest) -> str:
    return f"pool/{manifest.pool}" if manifest.pool else manifest.model or "-"


def _budget(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:g}s"


_MODEL = (
    Column("NAME", lambda model: model.name),
    Column("POOL", lambda model: model.manifest.pool_name or "-"),
    Column("KIND", lambda model: word_of(model.observed, "kind")),
    Column("STATUS", _state_of),
    Column("RUNNER", lambda model: model.observed.runner or "-"),
    Column("OPERATIONS", lambda model: ",".join(document_of(model.manifest)["operations"])),
    Column("CONTEXT", lambda model: str(context_tokens(model) or "-")),
)
_MODEL_WIDE = (
    *_MODEL,
    Column("PHASE", lambda model: word_of(model.instance, "phase") if model.instance else "-"),
    Column("SLOTS", lambda model: slots([model.instance] if model.instance else [])),
    Column("REMOTE", lambda model: "yes" if model.manifest.remote else "no"),
    Column("SKILLS", lambda model: ",".join(document_of(model.manifest)["skills"]) or "-"),
    Column("WAKE", lambda model: ",".join(who_wakes(model))),
    Column("HEARTBEAT", lambda model: ago(moment_of(model.observed, "last_heartbeat_time")), ticks=True),
    Column("AGE", lambda model: age(moment_of(model.observed, "create_time")), ticks=True),
    Column("DIGEST", lambda model: model.manifest.digest or "-"),
)
_AGENT = (
    Column("NAME", lambda agent: agent.name),
    Column("KIND", lambda agent: word_of(agent.observed, "kind")),
    Column("STATUS", lambda agent: agent.state),
    Column("MODEL", lambda agent: _target_of(agent.declared)),
    Column("DESCRIPTION", lambda agent: shortened(agent.declared.description)),
)
_AGENT_WIDE = (
    *_AGENT[:-1],
    Column("RUNNER", lambda agent: agent.observed.runner or "-"),
    Column("TOOLS", lambda agent: ",".join(agent.declared.behaviour.tools) or "-"),
    Column("SIGNALS", lambda agent: ",".join(agent.declared.behaviour.signals) or "-"),
    Column("AGE", lambda agent: age(moment_of(agent.observed, "create_time")), ticks=True),
    Column("DESCRIPTION", lambda agent: agent.declared.description),
)
_RUNNER = (
    Column("NAME", lambda runner: runner.name),
    Column("STATUS", lambda runner: runner.state),
    Column("LINK", lambda runner: document_of(runner.observed)["link"]),
    Column("HOST", lambda runner: runner.observed.host),
    Column("RUNTIME", lambda runner: runner.observed.runtime),
    Column("MODELS", lambda runner: ",".join(one.model for one in runner.observed.capability.instances)),
    Column("SLOTS", lambda runner: slots(runner.observed.capability.instances)),
    Column("HEARTBEAT", lambda runner: ago(moment_of(runner.observed, "last_heartbeat_time")), ticks=True),
)
_RUNNER_WIDE = (
    *_RUNNER,
    Column("VERSION", lambda runner: runner.observed.version),
    Column("DRAINING", lambda runner: "yes" if runner.observed.capability.draining else "no"),
    Column("ADDRESS", lambda runner: runner.observed.address),
)
_POOL = (
    Column("NAME", lambda pool: pool.name),
    Column("MEMBERS", lambda pool: str(pool.observed.size)),
    Column("ACTIVE", lambda pool: str(pool.observed.active_count)),
    Column("EXPLICIT", lambda pool: "yes" if pool.observed.explicit else "no"),
)
_POOL_WIDE = (
    *_POOL,
    Column("MODELS", lambda pool: ",".join(pool.declared.members)),
)
_ROUTE = (
    Column("NAME", lambda route: route.name),
    Column("STATUS", lambda route: route.state),
    Column("CANDIDATES", lambda route: shortened(",".join(route.declared.candidates))),
    Column("BUDGET", lambda route: _budget(seconds_of(route.declared, "budget"))),
    Column("DESCRIPTION", lambda route: shortened(route.declared.description)),
)
_ROUTE_WIDE = (
    *_ROUTE[:2],
    Column("CANDIDATES", lambda route: ",".join(route.declared.candidates)),
    _ROUTE[3],
    Column("KEEP", lambda route: keep_alive_text(seconds_of(route.declared, "keep_alive"))),
    Column("PINNED", lambda route: "yes" if route.declared.pin_primary else "no"),
    Column("AGE", lambda route: age(moment_of(route.observed, "create_time")), ticks=True),
    Column("DESCRIPTION", lambda route: route.declared.description),
)


def _resource(event: Event) -> str:
    """Returns KIND/NAME of an event's resource."""
    return f"{word_of(event, 'kind')}/{event.name}"


_EVENT = (
    Column("TIME", lambda event: local_time(event.time), min_chars=19),
    Column("RESOURCE", _resource, min_chars=20),
    Column("REASON", lambda event: word_of(event, "reason"), min_chars=10),
    Column("MESSAGE", lambda event: event.message),
)


EVENTS = Listing(
    columns=_EVENT,
    wide=_EVENT,
    name=_resource,
    document=document_of,
    yaml=lambda event: yaml_text(document_of(event)),
    plural="events",
)


def _listing(kind: ResourceKind, columns: Sequence[Column], wide: Sequence[Column]) -> Listing:
    return Listing(
        columns=columns,
        wide=wide,
        name=lambda document: document.label,
        kind=kind.list_kind,
        document=plain,
        yaml=lambda document: to_yaml([document]),
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
    )
}


def context_tokens(model: ModelDocument) -> int:
    """Returns context of one slot in tokens: as declared, else as loaded; 0: unknown."""
    return model.manifest.context_tokens or (model.instance.context_tokens if model.instance is not None else 0)


def who_wakes(model: ModelDocument) -> list[str]:
    """Who wakes a sleeping model, such as "mesh:wake_on_lan"; recipes themselves may hold secrets."""
    wake = model.manifest.wake
    who = ["runner"] if wake.by_runner else []
    return [*who, f"mesh:{wake.by_mesh.WhichOneof('action')}"] if wake.HasField("by_mesh") else who


def slots(instances: Sequence[InstanceState]) -> str:
    """Returns used and total slots of several instances."""
    return f"{sum(one.slots_used for one in instances)}/{sum(one.slots_total for one in instances)}"


def keep_alive_text(seconds: float | None) -> str:
    """Returns how long a model stays loaded after a request, such as "300s"; "-": not configured."""
    if seconds is None:
        return "-"
    return "never" if seconds < 0 else f"{seconds:g}s"


def age(moment: datetime | None) -> str:
    """Returns how long ago, such as "3h"."""
    return "-" if moment is None else seconds_ago((datetime.now(UTC) - moment).total_seconds())


def ago(moment: datetime | None) -> str:
    """Returns an age as text, such as "3h ago"."""
    return "-" if moment is None else f"{age(moment)} ago"


def shortened(text: str) -> str:
    """Returns a text cut to a number of characters."""
    return text if len(text) <= MAX_DESCRIPTION_CELL_CHARS else f"{text[: MAX_DESCRIPTION_CELL_CHARS - 1]}…"
