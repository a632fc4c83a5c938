"""A router's scheduling loop over a view of the mesh."""

from typing import Any

from router_svc.loop import LoopDeps, RouterRecords, SchedulingLoop, TicketIssuer, WakeFinished
from router_svc.policy.decisions import Wakes
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.pool_settings import Settings
from weft.dispatch.fleet import FleetView
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import Operation
from weft.kernel.time.clock import Clock, SystemClock


def placement_request(request_id: str = "r-1", **fields: Any) -> PlacementRequest:
    known = {"tenant": "a", "model": "qwen", "operation": Operation.CHAT}
    return PlacementRequest(request_id=request_id, **{**known, **fields})


class SlowWaker:
    """No wake of it ever ends."""

    def begin(self, wakes: Wakes, finished: WakeFinished) -> None:
        del wakes, finished

    def give_up(self, model: str) -> None:
        raise AssertionError(f"{model} waits for no memory")


class NothingRuns:
    """A loop without requests, for what only reads records."""

    def cancel(self, request_id: str, tenant: str, cancelled_by: str) -> dict[int, Any]:
        return {}

    def finish(self, key: int, reason: object) -> None:
        raise AssertionError(key)


def scheduling_loop(
    view: FleetView | None = None,
    *,
    clock: Clock | None = None,
    limits: SchedulerLimits | None = None,
    settings: Settings | None = None,
    **deps: Any,
) -> SchedulingLoop:
    """`deps`: those of LoopDeps; nothing is recorded or woken without them."""
    clock = clock or SystemClock()
    known = {"waker": SlowWaker(), "tickets": TicketIssuer(clock), "records": RouterRecords.empty(clock)}
    parts = LoopDeps(**{**known, **deps})
    loop = SchedulingLoop(limits or SchedulerLimits(), settings or Settings(), clock, parts)
    loop.update_view(view or FleetView())
    return loop
