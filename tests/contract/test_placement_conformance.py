"""The placement port's suite on both transports: inside one process, and over gRPC."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from kit.fleet import model_view, ready, runner_view
from kit.scheduling import scheduling_loop
from kit.serving import served

from router_svc.loop import SchedulingLoop, WakeEnd, WakeFinished
from router_svc.placement import LocalPlacement, PlacementServicer, add_placement_to_server
from router_svc.policy.decisions import Wakes
from router_svc.policy.limits import SchedulerLimits
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.dispatch.fleet import FleetView
from weft.dispatch.placement import RouterPort
from weft.dispatch.remote_router import RemoteRouter
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.time.clock import SystemClock
from weft_testing.conformance.placement import POOL, PlacementConformance


def fleet_view(slots: int, phase: "InstanceState.Phase.ValueType" = InstanceState.PHASE_READY) -> FleetView:
    runners = {
        name: runner_view(
            name,
            incarnation=f"run-{name}",
            ticket_key=name.encode() * 32,
            instances={f"m-{name}": ready(f"m-{name}", slots, phase=phase)},
        )
        for name in "ab"
    }
    models = {f"m-{name}": model_view(f"m-{name}", name, pool=POOL) for name in "ab"}
    return FleetView(1, runners, models)


class ImmediateWaker:
    """Every wake ends at once: with the error, or with everything ready."""

    def __init__(self, error: WeftError | None) -> None:
        self._error = error
        self.loop: SchedulingLoop | None = None

    def begin(self, wakes: Wakes, finished: WakeFinished) -> None:
        asyncio.get_running_loop().call_soon(self._end, finished)

    def give_up(self, model: str) -> None:
        raise AssertionError(f"{model} waits for no memory")

    def _end(self, finished: WakeFinished) -> None:
        if self._error is None and self.loop is not None:
            self.loop.update_view(fleet_view(slots=1))
        finished(WakeEnd(error=self._error))


def loop_over(view: FleetView, wake_error: WeftError | None = None) -> SchedulingLoop:
    waker = ImmediateWaker(wake_error)
    waker.loop = scheduling_loop(view, limits=SchedulerLimits(queue_depth_per_runner=1), waker=waker)
    return waker.loop


async def until_nothing_is_held(loop: SchedulingLoop) -> None:
    """A cancelled call reaches the router a moment later; by then every slot must be free again."""
    for _ in range(200):
        if (loop.scheduler.waiting, loop.scheduler.running) == (0, 0):
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"after 1 s {loop.scheduler.waiting} wait and {loop.scheduler.running} run")


class RouterPlacement(PlacementConformance):
    """The router's scheduling loop behind some transport."""

    def placement(self, slots: int) -> AbstractAsyncContextManager[RouterPort]:
        return self.over(loop_over(fleet_view(slots)))

    def sleeping_placement(self, wake_error: WeftError | None) -> AbstractAsyncContextManager[RouterPort]:
        return self.over(loop_over(fleet_view(1, InstanceState.PHASE_HIBERNATING), wake_error))

    def over(self, loop: SchedulingLoop) -> AbstractAsyncContextManager[RouterPort]:
        raise NotImplementedError


class TestLocalPlacement(RouterPlacement):
    @asynccontextmanager
    async def over(self, loop: SchedulingLoop) -> AsyncGenerator[RouterPort]:
        yield LocalPlacement(loop)
        await until_nothing_is_held(loop)
        loop.close()


class TestRemotePlacement(RouterPlacement):
    @pytest.fixture(autouse=True)
    def _in_a_folder(self, tmp_path: Path) -> None:
        self._socket = tmp_path / "router.sock"

    @asynccontextmanager
    async def over(self, loop: SchedulingLoop) -> AsyncGenerator[RouterPort]:
        servicer = PlacementServicer(LocalPlacement(loop))
        async with served(self._socket, (add_placement_to_server, servicer)) as channel:
            yield RemoteRouter(channel, SystemClock())
            await until_nothing_is_held(loop)
        loop.close()
