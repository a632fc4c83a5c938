"""Routers of which one leads, as a gateway sees them: scheduling loops behind gRPC servers with a health each."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from kit.fleet import model_view, ready, runner_view
from kit.scheduling import placement_request, scheduling_loop
from kit.waiting import until

from router_svc.loop import RouterRecords
from router_svc.placement import LocalPlacement, PlacementServicer, add_placement_to_server
from weft.api.registry.v1.router_pb2 import Router as RegisteredRouter
from weft.api.router.v1.placement_service_pb2 import Granted
from weft.dispatch.fleet import FleetView
from weft.dispatch.leader_placement import LeaderPlacement
from weft.dispatch.reconnecting_placement import ReconnectConfig, ReconnectingPlacement
from weft.kernel.channels.rpc import new_server, open_channel
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.time.clock import SystemClock

PLACEMENT = "weft.api.router.v1.PlacementService"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
NAMES = ("r1", "r2", "r3")
CLOCK = SystemClock()


def mesh(slots: int, routers: dict[str, RegisteredRouter]) -> FleetView:
    """One pool with one runner."""
    runner = runner_view("a", instances={"m": ready("m", slots)})
    model = model_view("m", "a", pool="p")
    return FleetView(1, {"a": runner}, {"m": model}, routers=routers)


@dataclass
class Router:
    """A router's scheduling loop behind a gRPC server."""

    name: str
    address: str
    records: RouterRecords = field(default_factory=lambda: RouterRecords.empty(CLOCK))
    server: grpc.aio.Server = field(default_factory=new_server)
    answers: health.aio.HealthServicer = field(default_factory=health.aio.HealthServicer)

    def __post_init__(self) -> None:
        self.loop = scheduling_loop(clock=CLOCK, records=self.records)

    async def start(self) -> None:
        servicer = PlacementServicer(LocalPlacement(self.loop))
        add_placement_to_server(servicer, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(self.answers, self.server)
        await self.lead(False)
        self.server.add_insecure_port(self.address)
        await self.server.start()

    async def lead(self, leads: bool = True) -> None:
        """Say whether it leads, as its health does."""
        await self.answers.set(PLACEMENT, SERVING if leads else NOT_SERVING)

    async def kill(self) -> None:
        await self.server.stop(grace=None)
        self.loop.close()


class Mesh:
    """Routers, and a gateway's view of them."""

    def __init__(self, folder: Path) -> None:
        self.routers = {name: Router(name, f"unix:{folder / name}.sock") for name in NAMES}
        self.view = FleetView()
        self.configured = open_channel(self.routers["r1"].address)
        self.placement = LeaderPlacement(self.configured, self.routers["r1"].address, CLOCK)

    def show(self, *names: str, slots: int = 1) -> None:
        """Give every router and the gateway a view with these routers."""
        there = {
            name: RegisteredRouter(name=name, incarnation="1", address=self.routers[name].address) for name in names
        }
        self.view = mesh(slots, there)
        for router in self.routers.values():
            router.loop.update_view(self.view)
        self.placement.update_view(self.view)

    async def lead(self, name: str) -> Router:
        """Let this router lead from now on, and the gateway know it."""
        for each, router in self.routers.items():
            await router.lead(each == name)
        await until(lambda: self.placement.leader is not None and self.placement.leader.router.name == name)
        return self.routers[name]

    def place(self, request: PlacementRequest) -> ReconnectingPlacement:
        return ReconnectingPlacement(self.placement, request, CLOCK, ReconnectConfig(router_outage_limit_seconds=5.0))


@asynccontextmanager
async def running(folder: Path) -> AsyncGenerator[Mesh]:
    made = Mesh(folder)
    async with AsyncExitStack() as ends:
        for router in made.routers.values():
            await router.start()
            ends.push_async_callback(router.kill)
        ends.push_async_callback(made.configured.close)
        ends.push_async_callback(made.placement.close)
        made.show(*NAMES)
        await made.lead("r1")
        yield made


def a_request(number: int = 1, seconds_left: float = 30.0) -> PlacementRequest:
    return placement_request(f"req-{number}", tenant="t", model="m", seconds_left=seconds_left)


async def granted(placement: ReconnectingPlacement) -> Granted:
    while True:
        decision = await placement.next_decision()
        if decision.HasField("granted"):
            return decision.granted
