"""The `status` of each kind: its observed state, beside what is declared. `apply` ignores it."""

from datetime import datetime
from typing import Literal

from weft.documents.document_base import DocumentPart
from weft.kernel.clock import offset_words, refused_words
from weft.kernel.reasons import MODEL_NOT_LISTED

# "unknown" is what a registry of another version may say.
Owner = Literal["public", "virtual", "unknown"]
State = Literal["active", "inactive", "hibernating", "unknown"]
Phase = Literal["idle", "loading", "ready", "draining", "stopping", "crash-loop", "failed", "hibernating", "unknown"]


class Condition(DocumentPart):
    """One thing that does or does not hold, and why."""

    type: str
    """What it is about, such as "Ready"."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: str
    """Why, in one word for programs, such as "CrashLoop"."""
    message: str
    """Why, in words for people."""


class MemoryStatus(DocumentPart):
    """The accelerator memory of one model on one runner."""

    leased_bytes: int
    """What its lease says; 0: it holds none."""
    measured_bytes: int | None = None
    """What its processes were seen to hold, where that can be seen."""
    estimated_bytes: int | None = None
    """What loading it takes or would take."""
    estimate_source: str | None = None
    """Where that comes from: learned, manifest, header, file_size or name."""
    device_indexes: tuple[int, ...] = ()
    """The devices of its lease, by number on the host."""


class InstanceStatus(DocumentPart):
    """One model on one runner."""

    model: str
    """The model, by name."""
    phase: Phase
    """Where it is in its life."""
    slots_total: int
    """Requests it can work on at once."""
    slots_used: int
    """Requests it works on."""
    load_progress: float | None = None
    """Share of loading done, 0 to 1."""
    context_tokens: int | None = None
    """Context of one slot, where it is known."""
    detail: str | None = None
    """Why it is in this phase, when that needs saying."""
    memory: MemoryStatus | None = None
    """Its accelerator memory, where its runner says anything of it."""
    unload_at: datetime | None = None
    """When it is unloaded if nothing is asked of it until then."""
    pinned: bool = False
    """Whether it is never evicted for another model."""
    load_eta_seconds: float | None = None
    """How long loading will still take, from earlier loads."""
    fault_count: int = 0
    """How often its backend ended because of a fault since its runner started."""
    last_fault: str | None = None
    """How it ended the last time: the signal or the exit code, and the likely cause where there is one."""


class ModelStatus(DocumentPart):
    """What is true of a model now."""

    kind: Owner
    """public: an operator declared it. virtual: a runner published it, and it goes with the runner."""
    state: State
    """Whether requests for it can be served; a hibernating one is woken by the next request."""
    pool: str
    """The pool it is in: `poolName`, or else its own name."""
    runner: str | None = None
    """The runner that serves it."""
    instance: InstanceStatus | None = None
    """How it does on that runner, while that is known."""
    created_at: datetime | None = None
    """When it was first declared or published."""
    last_heartbeat_at: datetime | None = None
    """When its runner sent its last heartbeat."""
    inactive_since: datetime | None = None
    """Since when its runner is gone."""
    conditions: tuple[Condition, ...] = ()
    """HasRunner, Awake and Ready."""


class AgentStatus(DocumentPart):
    """What is true of an agent now."""

    kind: Owner
    """public: an operator declared it. virtual: a runner published it, and it goes with the runner."""
    state: State
    """Whether it can answer."""
    runner: str | None = None
    """The runner that published it."""
    created_at: datetime | None = None
    """When it was first declared or published."""
    last_heartbeat_at: datetime | None = None
    """When its runner sent its last heartbeat."""
    inactive_since: datetime | None = None
    """Since when its runner is gone."""
    conditions: tuple[Condition, ...] = ()
    """Target and Ready."""


class RunnerStatus(DocumentPart):
    """What is true of a runner now."""

    state: State
    """Whether it sends heartbeats."""
    incarnation: str
    """One life of its process."""
    address: str
    """Where its services are reached, as a gRPC target."""
    link: Literal["direct", "dial-out"]
    """Whether the mesh connects to it, or it holds a link to the mesh."""
    host: str
    """The host it runs on."""
    runtime: str
    """The runtime it serves."""
    version: str
    """The version of weft it runs."""
    draining: bool
    """Whether it finishes what runs and takes nothing new."""
    max_requests: int | None = None
    """Requests it works on at once over all its models; absent: as many as its slots."""
    instances: tuple[InstanceStatus, ...] = ()
    """Its models."""
    clock_offset_seconds: float | None = None
    """How far its clock is ahead of the mesh's, negative: behind; absent: not notably."""
    clock_refused: bool = False
    """Whether it takes no requests because of that."""
    last_heartbeat_at: datetime | None = None
    """When it sent its last heartbeat."""
    inactive_since: datetime | None = None
    """Since when it is gone."""
    conditions: tuple[Condition, ...] = ()
    """Connected and Ready."""


class MemberStatus(DocumentPart):
    """A model of a pool."""

    name: str
    """The model."""
    kind: Owner
    """Who declared it."""
    state: State
    """Whether it can be served."""
    runner: str | None = None
    """The runner that serves it."""


class PoolStatus(DocumentPart):
    """What is true of a pool now."""

    explicit: bool
    """Whether a member names it in its `poolName`; otherwise it is the pool of one model."""
    size: int
    """How many members it has."""
    active_count: int
    """How many of them are active."""
    members: tuple[MemberStatus, ...] = ()
    """Its members."""
    conditions: tuple[Condition, ...] = ()
    """Ready."""


class RouteStatus(DocumentPart):
    """What is true of a route now."""

    state: State
    """Whether it can answer: the best that one of its candidates has."""
    created_at: datetime | None = None
    """When it was first declared."""
    conditions: tuple[Condition, ...] = ()
    """Ready."""


READY = "Ready"

# Reason and message of a model that is not ready, by the phase of its instance.
_NOT_READY: dict[str, tuple[str, str]] = {
    "idle": ("NotLoaded", "its backend does not run; the next request starts it"),
    "loading": ("Loading", "its backend loads"),
    "draining": ("Draining", "it finishes what runs and takes nothing new"),
    "stopping": ("Stopping", "its backend is being ended"),
    "crash-loop": ("CrashLoop", "its backend died too often in a row and waits before it is started again"),
    "failed": ("Failed", "its backend cannot be started"),
    "hibernating": ("Hibernating", "it sleeps; the next request wakes it"),
}


def model_conditions(status: ModelStatus) -> tuple[Condition, ...]:
    """HasRunner, Awake and Ready of a model."""
    return _has_runner(status), _awake(status), _model_ready(status)


def agent_conditions(status: AgentStatus, target: str) -> tuple[Condition, ...]:
    """Target and Ready of an agent that points to `target`, such as "model/qwen"."""
    if status.inactive_since is not None:
        gone = f"its runner {status.runner} is gone since {_time(status.inactive_since)}"
        unknown = Condition(type="Target", status="Unknown", reason="RunnerGone", message=gone)
        return unknown, _holds(READY, False, "RunnerGone", gone)
    match status.state:
        case "active":
            return (
                _holds("Target", True, "Active", f"{target} is active"),
                _holds(READY, True, "Active", f"{target} takes requests"),
            )
        case "hibernating":
            asleep = f"{target} sleeps; the next request wakes it"
            return _holds("Target", True, "Hibernating", asleep), _holds(READY, False, "Hibernating", asleep)
        case _:
            missing = f"{target} has no member that can answer"
            return _holds("Target", False, "Inactive", missing), _holds(READY, False, "TargetInactive", missing)


def runner_conditions(status: RunnerStatus) -> tuple[Condition, ...]:
    """Connected and Ready of a runner."""
    if status.state != "active":
        since = f" since {_time(status.inactive_since)}" if status.inactive_since is not None else ""
        gone = f"it is silent or said good-bye{since}"
        return _holds("Connected", False, "Gone", gone), _holds(READY, False, "Gone", gone)
    connected = _holds("Connected", True, "Heartbeats", "its heartbeats arrive")
    if status.draining:
        return connected, _holds(READY, False, "Draining", "it finishes what runs and takes nothing new")
    offset = status.clock_offset_seconds
    if status.clock_refused:
        return connected, _holds(READY, False, "ClockOff", refused_words(offset or 0.0))
    but = "" if offset is None else f"; {offset_words(offset)}"
    return connected, _holds(READY, True, "TakesRequests", f"it takes requests{but}")


def pool_conditions(status: PoolStatus) -> tuple[Condition, ...]:
    """Ready of a pool."""
    if status.active_count:
        return (_holds(READY, True, "Active", f"{status.active_count} of {status.size} members are active"),)
    if any(member.state == "hibernating" for member in status.members):
        return (_holds(READY, False, "Hibernating", "its members sleep; the next request wakes one"),)
    return (_holds(READY, False, "NoActiveMember", f"none of {status.size} members is active"),)


def route_conditions(status: RouteStatus) -> tuple[Condition, ...]:
    """Ready of a route."""
    match status.state:
        case "active":
            return (_holds(READY, True, "Active", "a candidate is active"),)
        case "hibernating":
            asleep = "no candidate is active, and one sleeps; the next request wakes it"
            return (_holds(READY, False, "Hibernating", asleep),)
        case _:
            return (_holds(READY, False, "NoActiveCandidate", "no candidate can answer"),)


def _has_runner(status: ModelStatus) -> Condition:
    if status.runner is None:
        return _holds("HasRunner", False, "NoRunner", "no live runner publishes it")
    if status.inactive_since is not None or status.state == "inactive":
        return _holds("HasRunner", False, "RunnerGone", _gone(status))
    return _holds("HasRunner", True, "Published", f"{status.runner} serves it")


def _awake(status: ModelStatus) -> Condition:
    if status.state == "hibernating":
        return _holds("Awake", False, "Hibernating", _NOT_READY["hibernating"][1])
    if status.state == "active":
        return _holds("Awake", True, "Awake", "it does not sleep")
    return Condition(type="Awake", status="Unknown", reason="NoRunner", message="nobody is there who could tell")


def _model_ready(status: ModelStatus) -> Condition:
    if status.state == "hibernating":
        return _holds(READY, False, *_NOT_READY["hibernating"])
    if status.state != "active":
        reason = "NoRunner" if status.runner is None else "RunnerGone"
        return _holds(READY, False, reason, _gone(status))
    instance = status.instance
    if instance is not None and instance.phase in _NOT_READY:
        if instance.detail is not None and instance.detail.startswith(MODEL_NOT_LISTED):
            return _holds(READY, False, "ModelNotListed", instance.detail)
        reason, message = _NOT_READY[instance.phase]
        return _holds(READY, False, reason, _with_detail(message, instance))
    return _holds(READY, True, "TakesRequests", "it takes requests")


def _gone(status: ModelStatus) -> str:
    if status.runner is None:
        return "no live runner publishes it"
    since = f" since {_time(status.inactive_since)}" if status.inactive_since is not None else ""
    return f"its runner {status.runner} is gone{since}"


def _with_detail(message: str, instance: InstanceStatus) -> str:
    return f"{message}: {instance.detail}" if instance.detail else message


def _holds(what: str, holds: bool, reason: str, message: str) -> Condition:
    return Condition(type=what, status="True" if holds else "False", reason=reason, message=message)


def _time(moment: object) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}" if moment is not None else "an unknown time"
