"""The placement port's suite on both transports: inside one process, and over gRPC."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router_svc.loop import SchedulingLoop
from router_svc.placement import LocalPlacement
from router_svc.placement_servicer import PlacementServicer
from router_svc.policy.scheduler import SchedulerLimits
from weft.api.router.v1 import placement_service_pb2_grpc
from weft.dispatch.fleet import FleetView, InstanceView, ModelView, Phase, RunnerView
from weft.dispatch.port import PlacementPort
from weft.dispatch.remote import RemotePlacement
from weft.kernel.clock import SystemClock
from weft.kernel.request import Operation
from weft.kernel.rpc import new_server, open_channel
from weft.testing.conformance.placement import POOL, PlacementConformance


def fleet_view(slots: int) -> FleetView:
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
            instances={f"m-{name}": _instance(f"m-{name}", slots)},
        )
        for name in "ab"
    }
    models = {f"m-{name}": _model(f"m-{name}", name) for name in "ab"}
    return FleetView(1, runners, models)


def _instance(model: str, slots: int) -> InstanceView:
    return InstanceView(model=model, phase=Phase.READY, slots_total=slots, slots_used=0, load_progress=None, detail="")


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


def scheduling_loop(slots: int) -> SchedulingLoop:
    loop = SchedulingLoop(SchedulerLimits(queue_depth_per_runner=1), SystemClock(), ticket_lifetime_seconds=30.0)
    loop.update_view(fleet_view(slots))
    return loop


async def until_nothing_is_held(loop: SchedulingLoop) -> None:
    """A cancelled call reaches the router a moment later; by then every slot must be free again."""
    for _ in range(200):
        if (loop.waiting, loop.running) == (0, 0):
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"after 1 s {loop.waiting} wait and {loop.running} run")


class TestLocalPlacement(PlacementConformance):
    @asynccontextmanager
    async def placement(self, slots: int) -> AsyncGenerator[PlacementPort]:
        loop = scheduling_loop(slots)
        yield LocalPlacement(loop)
        await until_nothing_is_held(loop)
        loop.close()


class TestRemotePlacement(PlacementConformance):
    @pytest.fixture(autouse=True)
    def _socket(self, tmp_path: Path) -> None:
        self._address = f"unix:{tmp_path / 'router.sock'}"

    @asynccontextmanager
    async def placement(self, slots: int) -> AsyncGenerator[PlacementPort]:
        loop = scheduling_loop(slots)
        server = new_server()
        placement_service_pb2_grpc.add_PlacementServiceServicer_to_server(
            PlacementServicer(LocalPlacement(loop)), server
        )
        server.add_insecure_port(self._address)
        await server.start()
        channel = open_channel(self._address)
        try:
            yield RemotePlacement(channel)
            await until_nothing_is_held(loop)
        finally:
            await channel.close()
            await server.stop(grace=1.0)
            loop.close()
