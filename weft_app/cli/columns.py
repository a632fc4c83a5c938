"""The table columns of each resource kind."""

from collections.abc import Sequence
from datetime import UTC, datetime

from weft.documents.document_base import ResourceKind
from weft.documents.documents import Document, EventDocument, ModelDocument
from weft.documents.statuses import InstanceStatus, ModelStatus
from weft_app.cli.output import Column, seconds_ago

MAX_DESCRIPTION_CELL_CHARS = 60
_USELESS = frozenset({"failed", "crash-loop"})

_MODEL = (
    Column("NAME", lambda model: model.name),
    Column("POOL", lambda model: model.pool_name or "-"),
    Column("KIND", lambda model: model.status.kind),
    Column("STATUS", lambda model: _state_of(model.status)),
    Column("RUNNER", lambda model: model.status.runner or "-"),
    Column("OPERATIONS", lambda model: ",".join(model.operations)),
    Column("CONTEXT", lambda model: str(context_tokens(model) or "-")),
)
_MODEL_WIDE = (
    Column("PHASE", lambda model: model.status.instance.phase if model.status.instance else "-"),
    Column("SLOTS", lambda model: slots((model.status.instance,) if model.status.instance else ())),
    Column("REMOTE", lambda model: "yes" if model.remote else "no"),
    Column("SKILLS", lambda model: ",".join(model.skills) or "-"),
    Column("WAKE", lambda model: ",".join(who_wakes(model))),
    Column("HEARTBEAT", lambda model: ago(model.status.last_heartbeat_at), ticks=True),
    Column("AGE", lambda model: age(model.status.created_at), ticks=True),
    Column("DIGEST", lambda model: model.digest or "-"),
)
_AGENT = (
    Column("NAME", lambda agent: agent.name),
    Column("KIND", lambda agent: agent.status.kind),
    Column("STATUS", lambda agent: agent.status.state),
    Column("MODEL", lambda agent: f"pool/{agent.pool}" if agent.pool else agent.model or "-"),
    Column("DESCRIPTION", lambda agent: shortened(agent.description)),
)
_AGENT_WIDE = (
    *_AGENT[:-1],
    Column("RUNNER", lambda agent: agent.status.runner or "-"),
    Column("TOOLS", lambda agent: ",".join(agent.tools) or "-"),
    Column("SIGNALS", lambda agent: ",".join(agent.signals) or "-"),
    Column("AGE", lambda agent: age(agent.status.created_at), ticks=True),
    Column("DESCRIPTION", lambda agent: agent.description),
)
_RUNNER = (
    Column("NAME", lambda runner: runner.name),
    Column("STATUS", lambda runner: runner.status.state),
    Column("LINK", lambda runner: runner.status.link),
    Column("HOST", lambda runner: runner.status.host),
    Column("RUNTIME", lambda runner: runner.status.runtime),
    Column("MODELS", lambda runner: ",".join(instance.model for instance in runner.status.instances)),
    Column("SLOTS", lambda runner: slots(runner.status.instances)),
    Column("HEARTBEAT", lambda runner: ago(runner.status.last_heartbeat_at), ticks=True),
)
_RUNNER_WIDE = (
    Column("VERSION", lambda runner: runner.status.version),
    Column("DRAINING", lambda runner: "yes" if runner.status.draining else "no"),
    Column("ADDRESS", lambda runner: runner.status.address),
)
_POOL = (
    Column("NAME", lambda pool: pool.name),
    Column("MEMBERS", lambda pool: str(pool.status.size)),
    Column("ACTIVE", lambda pool: str(pool.status.active_count)),
    Column("EXPLICIT", lambda pool: "yes" if pool.status.explicit else "no"),
)
_POOL_WIDE = (Column("MODELS", lambda pool: ",".join(pool.members)),)
_ROUTE = (
    Column("NAME", lambda route: route.name),
    Column("STATUS", lambda route: route.status.state),
    Column("CANDIDATES", lambda route: shortened(",".join(route.candidates))),
    Column("BUDGET", lambda route: "-" if route.budget_seconds is None else f"{route.budget_seconds:g}s"),
    Column("DESCRIPTION", lambda route: shortened(route.description)),
)
_ROUTE_WIDE = (
    *_ROUTE[:2],
    Column("CANDIDATES", lambda route: ",".join(route.candidates)),
    _ROUTE[3],
    Column("KEEP", lambda route: keep_alive_text(route.keep_alive)),
    Column("PINNED", lambda route: "yes" if route.pin_primary else "no"),
    Column("AGE", lambda route: age(route.status.created_at), ticks=True),
    Column("DESCRIPTION", lambda route: route.description),
)
EVENT_COLUMNS: tuple[Column, ...] = (
    Column("TIME", lambda event: f"{event.time.astimezone():%Y-%m-%d %H:%M:%S}", min_chars=19),
    Column("RESOURCE", lambda event: f"{event.resource_kind}/{event.resource_name}", min_chars=20),
    Column("REASON", lambda event: event.reason, min_chars=10),
    Column("MESSAGE", lambda event: event.message),
)


def columns_of(kind: ResourceKind, *, wide: bool) -> Sequence[Column]:
    """Returns the table columns of a kind."""
    match kind:
        case ResourceKind.MODEL:
            return (*_MODEL, *_MODEL_WIDE) if wide else _MODEL
        case ResourceKind.AGENT:
            return _AGENT_WIDE if wide else _AGENT
        case ResourceKind.RUNNER:
            return (*_RUNNER, *_RUNNER_WIDE) if wide else _RUNNER
        case ResourceKind.POOL:
            return (*_POOL, *_POOL_WIDE) if wide else _POOL
        case ResourceKind.ROUTE:
            return _ROUTE_WIDE if wide else _ROUTE


def _state_of(status: ModelStatus) -> str:
    """Returns the state of a model, or of its instance where the runner is live and the model takes no requests."""
    phase = status.instance.phase if status.instance else ""
    return phase if status.state == "active" and phase in _USELESS else status.state


def label(document: Document) -> str:
    """Returns KIND/NAME of a resource."""
    return f"{document.kind}/{document.name}"


def resource(event: EventDocument) -> str:
    """Returns KIND/NAME of an event's resource."""
    return f"{event.resource_kind}/{event.resource_name}"


def context_tokens(model: ModelDocument) -> int:
    """Returns context of one slot in tokens: as declared, else as loaded; 0: unknown."""
    loaded = model.status.instance.context_tokens if model.status and model.status.instance else None
    return model.context_tokens or loaded or 0


def who_wakes(model: ModelDocument) -> list[str]:
    """Who wakes a sleeping model, such as "mesh:wake_on_lan"; recipes themselves may hold secrets."""
    if model.wake is None:
        return []
    who = ["runner"] if model.wake.by_runner else []
    return [*who, f"mesh:{model.wake.by_mesh.type}"] if model.wake.by_mesh else who


def slots(instances: Sequence[InstanceStatus]) -> str:
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
