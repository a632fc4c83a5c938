"""A scheduler with a fleet that is easy to write down."""

from typing import Any

from router_svc.policy.candidates import Candidate, Fleet, Readiness
from router_svc.policy.decisions import Decision, Placed, Rejects, Wakes
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.queue import Arrival
from router_svc.policy.scheduler import Scheduler
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation


def candidate(runner: str = "a", model: str = "m", **changes: Any) -> Candidate:
    fields: dict[str, Any] = {
        "model": model,
        "pool": model,
        "runner": runner,
        "incarnation": "1",
        "readiness": Readiness.READY,
        "slots": 1,
        "operations": frozenset(Operation),
        **changes,
    }
    return Candidate(**fields)


def asleep(runner: str = "a", model: str = "m", **changes: Any) -> Candidate:
    fields: dict[str, Any] = {"readiness": Readiness.ASLEEP, "max_wake_seconds": 60.0, **changes}
    return candidate(runner, model, **fields)


def arrival(key: int, target: str = "m", **changes: Any) -> Arrival:
    fields: dict[str, Any] = {"key": key, "target": target, "operation": Operation.CHAT, "arrived_at": 0.0, **changes}
    return Arrival(**fields)


def scheduler(*candidates: Candidate, **limits: Any) -> Scheduler:
    made = Scheduler(SchedulerLimits(**limits))
    made.update_fleet(Fleet.of(candidates), 0.0)
    return made


def placed(decisions: list[Decision]) -> dict[int, str]:
    """Who was placed, and on which runner."""
    return {decision.key: decision.candidate.runner for decision in decisions if isinstance(decision, Placed)}


def rejected(decisions: list[Decision]) -> dict[int, Reason]:
    """Who was refused, and why."""
    return {decision.key: decision.reason for decision in decisions if isinstance(decision, Rejects)}


def woken(decisions: list[Decision]) -> list[str]:
    """Which models are to be woken."""
    return [decision.model for decision in decisions if isinstance(decision, Wakes)]
