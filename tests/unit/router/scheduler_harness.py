"""A scheduler with a mesh that is easy to write down."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from router_svc.policy.decisions import Decision, Placed, Rejects, Waits, WakeFailure, Wakes
from router_svc.policy.endpoints.candidates import Candidate, Needs, Readiness
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.pool_settings import Settings
from router_svc.policy.router_request import Request
from router_svc.policy.scheduler import Scheduler
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import Operation
from weft.kernel.values.names import DEFAULT_TENANT

_OF_NEEDS = frozenset({"operation", "allow_remote", "skills", "tools", "context_tokens"})


class Mesh(Scheduler):
    """A scheduler that gets whole meshes; the changes between two of them are computed here."""

    def __init__(self, limits: SchedulerLimits | None = None, settings: Settings | None = None) -> None:
        super().__init__(limits, settings)
        self.shown: dict[str, Candidate] = {}

    def show(self, candidates: Iterable[Candidate], now: float, **changes: Any) -> list[Decision]:
        """The mesh consists of these now. `changes`: of MeshChange."""
        shown = {each.model: each for each in candidates}
        new = tuple(each for each in shown.values() if self.shown.get(each.model) != each)
        gone = tuple(model for model in self.shown if model not in shown)
        self.shown = shown
        return self.apply(MeshChange(candidates=new, gone=gone, **changes), now)


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


def arrival(
    key: int, target: str = "m", *, arrived_at: float = 0.0, deadline_at: float | None = None, **changes: Any
) -> Request:
    """`changes`: of PlacementRequest, or of its needs."""
    needs = {"operation": Operation.CHAT, **{name: changes.pop(name) for name in _OF_NEEDS & changes.keys()}}
    asked: dict[str, Any] = {"request_id": f"r-{key}", "tenant": DEFAULT_TENANT, "operation": needs["operation"]}
    spec = PlacementRequest(model=target, **asked | changes)
    return Request(key, spec, Needs(**needs), arrived_at=arrived_at, own_deadline_at=deadline_at)


def scheduler(*candidates: Candidate, settings: Settings | None = None, **limits: Any) -> Mesh:
    made = Mesh(SchedulerLimits(**limits), settings)
    made.show(candidates, 0.0)
    return made


def failed(message: str, reason: Reason = Reason.WAKE_FAILED) -> WakeFailure:
    return WakeFailure(reason=reason, message=message)


def plain(decisions: list[Decision]) -> list[Decision]:
    """Without who was considered, and how one was chosen."""
    return [_plain(decision) for decision in decisions]


def _plain(decision: Decision) -> Decision:
    match decision:
        case Waits():
            return replace(decision, considered=())
        case Placed():
            return replace(decision, choice=None)
        case _:
            return decision


def placed(decisions: list[Decision]) -> dict[int, str]:
    """Who was placed, and on which runner."""
    return {decision.key: decision.candidate.runner for decision in decisions if isinstance(decision, Placed)}


def rejected(decisions: list[Decision]) -> dict[int, Reason]:
    """Who was refused, and why."""
    return {decision.key: decision.reason for decision in decisions if isinstance(decision, Rejects)}


def refusals(decisions: list[Decision]) -> dict[int, Rejects]:
    """The refusals themselves."""
    return {decision.key: decision for decision in decisions if isinstance(decision, Rejects)}


def woken(decisions: list[Decision]) -> list[str]:
    """Which models are to be woken."""
    return [decision.model for decision in decisions if isinstance(decision, Wakes)]
