"""Conditions of a resource with their reasons, derived from its status."""

from weft.documents.statuses import (
    AgentStatus,
    Condition,
    InstanceStatus,
    ModelStatus,
    PoolStatus,
    RouteStatus,
    RunnerStatus,
)
from weft.kernel.clock import offset_words, refused_words
from weft.kernel.detail_words import MODEL_NOT_LISTED

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
