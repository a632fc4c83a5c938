"""Requests placed by several routers: each by the owner of its domain, and by another where that one is lost."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from router_svc.loop import LoopDeps, RouterRecords, SchedulingLoop, TicketIssuer, WakeFinished
from router_svc.ownership import OwnedPlacement, Ownership
from router_svc.placement import LocalPlacement, PlacementServicer
from router_svc.policy.decisions import Wakes
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.settings import Settings
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.api.router.v1 import placement_service_pb2_grpc
from weft.dispatch.domains import Domains, owner_of
from weft.dispatch.fleet import FleetView, ModelView, RouterView, RunnerView
from weft.dispatch.placement import MAX_UNREACHABLE_ROUTERS, Grant, PlacementRequest, WaitingInQueue
from weft.dispatch.reconnecting_placement import ReconnectConfig, ReconnectingPlacement
from weft.dispatch.remote_router import RemotePlace, RemotePlacement
from weft.dispatch.router_links import RouterLinks
from weft.dispatch.routers_placement import LinkedPlace, RoutersPlacement
from weft.kernel.clock import SystemClock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation
from weft.kernel.rpc import new_server, open_channel

PLACEMENT = "weft.api.router.v1.PlacementService"
NAMES = ("r1", "r2", "r3")
CLOCK = SystemClock()


def mesh(slots: int, routers: dict[str, RouterView]) -> FleetView:
    """One pool with one runner."""
    state = InstanceState(model="m", phase=InstanceState.PHASE_READY, slots_total=slots)
    runner = RunnerView(
        name="a",
        incarnation="run-a",
        address="unix:/nowhere/a.sock",
        host="here",
        runtime="fake",
        active=True,
        draining=False,
        ticket_key=b"k" * 32,
        instances={"m": state},
    )
    model = ModelView(
        name="m",
        pool="p",
        runner="a",
        operations=frozenset({Operation.CHAT}),
        remote=False,
        active=True,
        context_tokens=0,
        created_at_seconds=0,
    )
    return FleetView(1, {"a": runner}, {"m": model}, routers=routers)


class NoWaker:
    """No model of these tests sleeps."""

    def begin(self, wakes: Wakes, finished: WakeFinished) -> None:
        raise AssertionError(f"{wakes.model} is ready")

    def give_up(self, model: str) -> None:
        raise AssertionError(f"{model} waits for no memory")


@dataclass
class Router:
    """A router's scheduling loop and ownership behind a gRPC server."""

    name: str
    address: str
    records: RouterRecords = field(default_factory=lambda: RouterRecords.empty(CLOCK))
    server: grpc.aio.Server = field(default_factory=new_server)
    answers: health.aio.HealthServicer = field(default_factory=health.aio.HealthServicer)

    def __post_init__(self) -> None:
        self.ownership = Ownership(self.name)
        tickets = TicketIssuer(CLOCK, lifetime_seconds=30.0)
        parts = LoopDeps(waker=NoWaker(), tickets=tickets, records=self.records)
        self.loop = SchedulingLoop(SchedulerLimits(), Settings(), CLOCK, parts)

    async def start(self) -> None:
        servicer = PlacementServicer(LocalPlacement(self.loop), ownership=self.ownership)
        placement_service_pb2_grpc.add_PlacementServiceServicer_to_server(servicer, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(self.answers, self.server)
        await self.answer(health_pb2.HealthCheckResponse.SERVING)
        self.server.add_insecure_port(self.address)
        await self.server.start()

    async def answer(self, status: "health_pb2.HealthCheckResponse.ServingStatus.ValueType") -> None:
        await self.answers.set(PLACEMENT, status)

    def update_view(self, view: FleetView) -> None:
        self.loop.update_view(view)
        if self.ownership.update_view(view):
            self.loop.move_away(self.ownership.moved)

    async def kill(self) -> None:
        await self.server.stop(grace=None)
        self.loop.close()


class Mesh:
    """Routers, and a gateway's view of them."""

    def __init__(self, folder: Path) -> None:
        self.routers = {name: Router(name, f"unix:{folder / name}.sock") for name in NAMES}
        self.view = FleetView()
        self.links = RouterLinks(CLOCK)
        self.placement = RoutersPlacement(self, self.links, LocalPlacement(self.routers["r1"].loop))

    def show(self, *names: str, slots: int = 1) -> None:
        """Give every router and the gateway a view with these routers."""
        there = {name: RouterView(name=name, incarnation="1", address=self.routers[name].address) for name in names}
        self.view = mesh(slots, there)
        for router in self.routers.values():
            router.update_view(self.view)
        self.links.update_view(self.view)

    def owner(self, unreachable: frozenset[str] = frozenset()) -> Router:
        found = owner_of(Domains(self.view).key_of("m"), self.view.routers.values(), unreachable)
        assert found is not None
        return self.routers[found.name]

    def place(self, request: PlacementRequest) -> ReconnectingPlacement:
        return ReconnectingPlacement(self.placement, request, CLOCK, ReconnectConfig(router_outage_limit_seconds=5.0))


@asynccontextmanager
async def running(folder: Path) -> AsyncGenerator[Mesh]:
    made = Mesh(folder)
    async with AsyncExitStack() as ends:
        for router in made.routers.values():
            await router.start()
            ends.push_async_callback(router.kill)
        ends.push_async_callback(made.links.close)
        made.show(*NAMES)
        yield made


def a_request(number: int = 1) -> PlacementRequest:
    return PlacementRequest(
        request_id=f"req-{number}", tenant="t", model="m", operation=Operation.CHAT, seconds_left=30.0
    )


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not holds():  # noqa: ASYNC110 - what it looks at has no event
            await asyncio.sleep(0.005)


async def granted(placement: ReconnectingPlacement) -> Grant:
    while True:
        decision = await placement.next_decision()
        if isinstance(decision, Grant):
            return decision


async def test_a_request_is_placed_by_the_router_that_owns_its_domain(tmp_path: Path) -> None:
    async with running(tmp_path) as there, there.place(a_request()) as place:
        assert (await granted(place)).runner == "a"
        assert {name for name, router in there.routers.items() if router.loop.running} == {there.owner().name}


async def test_another_router_answers_moved_and_names_the_owner(tmp_path: Path) -> None:
    async with running(tmp_path) as there:
        owner = there.owner()
        other = next(router for router in there.routers.values() if router is not owner)
        async with open_channel(other.address) as channel, RemotePlacement(channel).place(a_request()) as place:
            with pytest.raises(WeftError) as refused:
                await place.next_decision()
        assert refused.value.reason is Reason.MOVED
        assert (refused.value.metadata["router"], refused.value.metadata["address"]) == (owner.name, owner.address)


async def test_a_router_places_for_one_that_its_caller_cannot_reach(tmp_path: Path) -> None:
    async with running(tmp_path) as there:
        lost = frozenset({there.owner().name})
        heir = there.owner(lost)
        request = replace(a_request(), unreachable_routers=lost)
        async with open_channel(heir.address) as channel, RemotePlacement(channel).place(request) as place:
            assert isinstance(await place.next_decision(), Grant)


async def test_a_request_that_comes_to_a_router_that_stops_is_placed_by_the_next_owner(tmp_path: Path) -> None:
    async with running(tmp_path) as there:
        stopping = there.owner()
        stopping.loop.close()
        async with there.place(a_request()) as place:
            waiting = asyncio.create_task(granted(place))
            done, _ = await asyncio.wait([waiting], timeout=0.2)
            assert not done, "a router that stops ended a request"
            there.show(*(name for name in NAMES if name != stopping.name))
            assert (await waiting).runner == "a"


async def test_more_unreachable_routers_than_the_bound_are_refused_by_name_of_the_field(tmp_path: Path) -> None:
    async with running(tmp_path) as there:
        request = replace(
            a_request(), unreachable_routers=frozenset(f"x{number}" for number in range(MAX_UNREACHABLE_ROUTERS + 1))
        )
        async with open_channel(there.owner().address) as channel, RemotePlacement(channel).place(request) as place:
            with pytest.raises(WeftError, match="unreachable_routers"):
                await place.next_decision()


async def test_a_request_that_waits_at_a_router_that_dies_is_placed_by_another(tmp_path: Path) -> None:
    async with running(tmp_path) as there, there.place(a_request(1)) as first, there.place(a_request(2)) as second:
        await granted(first)
        assert isinstance(await second.next_decision(), WaitingInQueue)
        dead = there.owner()
        heir = there.owner(frozenset({dead.name}))
        waiting = asyncio.create_task(granted(second))
        await dead.kill()
        # The heir does not know of the slot that the dead one granted: the runner would refuse, as it counts itself.
        assert (await waiting).runner == "a"
        assert heir.loop.running == 1
        # The stream that runs is not disturbed, and its end is no longer reported to anybody.
        await first.report_finished(Reason.UNSPECIFIED)


@pytest.mark.slow("runs whole services")
async def test_a_request_that_waits_at_a_router_that_answers_no_health_check_is_placed_by_another(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as there, there.place(a_request(1)) as first, there.place(a_request(2)) as second:
        await granted(first)
        assert isinstance(await second.next_decision(), WaitingInQueue)
        frozen = there.owner()
        waiting = asyncio.create_task(granted(second))
        await frozen.answer(health_pb2.HealthCheckResponse.NOT_SERVING)
        assert (await waiting).attempt == 1
        assert there.owner(frozenset({frozen.name})).loop.running == 1
        await until(lambda: frozen.loop.waiting == 0)
        # It is used again once it answers.
        await frozen.answer(health_pb2.HealthCheckResponse.SERVING)
        await until(lambda: not there.links.unreachable)


async def test_a_request_whose_domain_moves_while_it_waits_is_placed_by_the_new_owner(tmp_path: Path) -> None:
    async with running(tmp_path) as there:
        heir = there.owner()
        there.show(*(name for name in NAMES if name != heir.name))
        former = there.owner()
        async with there.place(a_request(1)) as first, there.place(a_request(2)) as second:
            await granted(first)
            assert isinstance(await second.next_decision(), WaitingInQueue)
            waiting = asyncio.create_task(granted(second))
            there.show(*NAMES)
            await waiting
            assert (heir.loop.running, former.loop.waiting) == (1, 0)
            # What it had granted runs on where it was.
            assert former.loop.running == 1


async def test_a_moved_request_is_counted_by_its_new_owner_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as there:
        heir = there.owner()
        there.show(*(name for name in NAMES if name != heir.name))
        former = there.owner()
        async with there.place(a_request(1)) as first, there.place(a_request(2)) as second:
            await granted(first)
            await second.next_decision()
            waiting = asyncio.create_task(granted(second))
            there.show(*NAMES)
            await waiting
            ended, _ = former.records.requests.ended(10, CLOCK.monotonic(), "", lambda _entry: True)
            assert [entry.reason for entry in ended] == [Reason.MOVED]
            assert former.records.usage.is_empty


@pytest.mark.slow("runs whole services")
async def test_without_any_router_a_request_waits_and_fails_with_its_deadline(tmp_path: Path) -> None:
    async with running(tmp_path) as there:
        for router in there.routers.values():
            await router.kill()
        request = replace(a_request(), seconds_left=1.5)
        async with there.place(request) as place:
            with pytest.raises(WeftError, match="no router answered") as failed:
                await granted(place)
        assert failed.value.reason is Reason.DEADLINE_EXCEEDED


async def test_before_a_router_has_announced_itself_the_configured_one_places(tmp_path: Path) -> None:
    async with running(tmp_path) as there:
        there.show()
        async with there.place(a_request()) as place:
            await granted(place)
            assert there.routers["r1"].loop.running == 1


async def test_a_router_refuses_tasks_that_another_one_owns(tmp_path: Path) -> None:
    async with running(tmp_path) as there:
        for name, router in there.routers.items():
            owned = OwnedPlacement(LocalPlacement(router.loop), router.ownership)
            if name == there.owner().name:
                async with owned.place(a_request()) as place:
                    assert isinstance(await place.next_decision(), Grant)
            else:
                with pytest.raises(WeftError, match=there.owner().name):
                    owned.place(a_request())


class CancelledWhileItEnds:
    """A call whose connection broke, and which was cancelled before its status was known: as grpc.aio raises it."""

    async def write(self, request: object) -> None:
        pass

    async def read(self) -> object:
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.CANCELLED,
            grpc.aio.Metadata(),
            grpc.aio.Metadata(),
            details="Locally cancelled by application!",
        )

    def cancel(self) -> bool:
        return True


class BreakingStub:
    """A stub of such calls."""

    def Place(self, **_: object) -> CancelledWhileItEnds:  # noqa: N802 - a name of gRPC
        return CancelledWhileItEnds()


@pytest.mark.parametrize("is_abandoned", [True, False])
async def test_a_placement_whose_connection_breaks_is_lost_and_not_cancelled(is_abandoned: bool) -> None:
    place = RemotePlace(cast("Any", BreakingStub()), a_request())
    async with place:
        if is_abandoned:
            place.abandon()
        with pytest.raises(WeftError) as raised:
            await place.next_decision()
    assert raised.value.reason is Reason.NO_ROUTER_AVAILABLE


class CutCall:
    """A call whose channel is closed: grpc.aio raises CancelledError, though no task is cancelled."""

    async def write(self, request: object) -> None:
        raise asyncio.CancelledError

    async def read(self) -> object:
        raise asyncio.CancelledError

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.CANCELLED

    def done(self) -> bool:
        return True

    def cancel(self) -> bool:
        return False


async def test_a_placement_whose_channel_is_closed_under_it_is_lost_and_its_task_goes_on() -> None:
    place = RemotePlace(cast("Any", SimpleNamespace(Place=lambda **_: CutCall())), a_request())
    async with place:
        await place.report_first_content(1)
        await place.report_finished(Reason.UNSPECIFIED)
        with pytest.raises(WeftError) as raised:
            await place.next_decision()
    assert raised.value.reason is Reason.NO_ROUTER_AVAILABLE


class WaitingCall(CutCall):
    """A call whose answer does not come."""

    async def read(self) -> object:
        return await asyncio.Event().wait()


async def test_a_placement_whose_task_is_cancelled_ends_with_it() -> None:
    async with RemotePlace(cast("Any", SimpleNamespace(Place=lambda **_: WaitingCall())), a_request()) as place:
        waiting = asyncio.create_task(place.next_decision())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_a_request_whose_router_leaves_while_it_is_placed_is_placed_by_the_next_owner(tmp_path: Path) -> None:
    async with running(tmp_path) as there, asyncio.timeout(10):
        leaving = there.owner()
        place = there.place(a_request())
        # Its channel is closed before the call begins.
        there.show(*(name for name in NAMES if name != leaving.name))
        await there.links.close()
        there.show(*(name for name in NAMES if name != leaving.name))
        async with place:
            assert (await granted(place)).runner == "a"


class NeverSent(CancelledWhileItEnds):
    """A call whose first write never ends."""

    async def write(self, request: object) -> None:
        await asyncio.Event().wait()


async def test_a_placement_whose_first_message_never_leaves_is_lost_with_its_router(tmp_path: Path) -> None:
    async with running(tmp_path) as there, asyncio.timeout(10):
        link = there.links.get(there.owner().name)
        assert link is not None
        place = LinkedPlace(link, a_request())
        place._place._stub = cast("Any", SimpleNamespace(Place=lambda **_: NeverSent()))
        entering = asyncio.create_task(place.__aenter__())
        await asyncio.sleep(0.05)
        assert not entering.done()
        link.note_lost()
        await entering
        with pytest.raises(WeftError) as raised:
            await place.next_decision()
        assert raised.value.reason is Reason.NO_ROUTER_AVAILABLE
        await place.__aexit__(None, None, None)
