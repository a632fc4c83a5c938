"""The placement port's suite on both transports: inside one process, and over gRPC."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from router_svc.loop import LoopDeps, RouterRecords, SchedulingLoop, TicketIssuer, WakeEnd, WakeFinished
from router_svc.placement import LocalPlacement, PlacementServicer
from router_svc.policy.decisions import Wakes
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.settings import Settings
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.api.router.v1 import placement_service_pb2_grpc
from weft.dispatch.fleet import FleetView, ModelView, RunnerView
from weft.dispatch.placement import RouterPort
from weft.dispatch.remote_router import RemoteRouter
from weft.kernel.clock import SystemClock
from weft.kernel.errors import WeftError
from weft.kernel.request import Operation
from weft.kernel.rpc import new_server, open_channel
from weft_testing.conformance.placement import POOL, PlacementConformance


def fleet_view(slots: int, phase: "InstanceState.Phase.ValueType" = InstanceState.PHASE_READY) -> FleetView:
    runners = {
        name: RunnerView(
            name=name,
            incarnation=f"run-{name}",
            address=f"unix:/nowhere/{name}.sock",
            host="here",
            runtime="fake",
            active=True,
            draining=False,
            ticket_key=name.encode() * 32,
            instances={f"m-{name}": _instance(f"m-{name}", slots, phase)},
        )
        for name in "ab"
    }
    models = {f"m-{name}": _model(f"m-{name}", name) for name in "ab"}
    return FleetView(1, runners, models)


def _instance(model: str, slots: int, phase: "InstanceState.Phase.ValueType") -> InstanceState:
    return InstanceState(model=model, phase=phase, slots_total=slots, slots_used=0, load_progress=None, detail="")


def _model(name: str, runner: str) -> ModelView:
    return ModelView(
        name=name,
        pool=POOL,
        runner=runner,
        operations=frozenset({Operation.CHAT}),
        remote=False,
        active=True,
        context_tokens=0,
        created_at_seconds=0,
    )


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


def scheduling_loop(view: FleetView, wake_error: WeftError | None = None) -> SchedulingLoop:
    waker = ImmediateWaker(wake_error)
    limits = SchedulerLimits(queue_depth_per_runner=1)
    clock = SystemClock()
    tickets = TicketIssuer(clock)
    parts = LoopDeps(waker=waker, tickets=tickets, records=RouterRecords.empty(clock))
    waker.loop = loop = SchedulingLoop(limits, Settings(), clock, parts)
    loop.update_view(view)
    return loop


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
        return self.over(scheduling_loop(fleet_view(slots)))

    def sleeping_placement(self, wake_error: WeftError | None) -> AbstractAsyncContextManager[RouterPort]:
        return self.over(scheduling_loop(fleet_view(1, InstanceState.PHASE_HIBERNATING), wake_error))

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
    def _socket(self, tmp_path: Path) -> None:
        self._address = f"unix:{tmp_path / 'router.sock'}"

    @asynccontextmanager
    async def over(self, loop: SchedulingLoop) -> AsyncGenerator[RouterPort]:
        server = new_server()
        placement_service_pb2_grpc.add_PlacementServiceServicer_to_server(
            PlacementServicer(LocalPlacement(loop)), server
        )
        server.add_insecure_port(self._address)
        await server.start()
        channel = open_channel(self._address)
        try:
            yield RemoteRouter(channel, SystemClock())
            await until_nothing_is_held(loop)
        finally:
            await channel.close()
            await server.stop(grace=1.0)
            loop.close()
