"""Placement by the router that leads, and by the next one where that one is lost."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2
from kit.grpc_server import served
from kit.refusals import refused
from kit.waiting import until
from leader_mesh import CLOCK, SERVING, a_request, granted, mesh, running

from weft.api.registry.v1.router_pb2 import Router as RegisteredRouter
from weft.dispatch.leader_placement import LeaderPlacement
from weft.dispatch.remote_router import RemotePlace, RemoteRouter
from weft.kernel.errors.reasons import Reason


async def test_leading_router_places_the_request(tmp_path: Path) -> None:
    async with running(tmp_path) as there, there.place(a_request()) as place:
        assert (await granted(place)).runner == "a"
        assert {name for name, router in there.routers.items() if router.loop.scheduler.running} == {"r1"}


async def test_request_waiting_at_a_dying_leader_is_placed_by_the_next(tmp_path: Path) -> None:
    async with running(tmp_path) as there, there.place(a_request(1)) as first, there.place(a_request(2)) as second:
        await granted(first)
        assert (await second.next_decision()).HasField("queued")
        waiting = asyncio.create_task(granted(second))
        await there.routers["r1"].kill()
        heir = await there.lead("r2")
        # The heir does not know of the slot that the dead one granted: the runner would refuse, as it counts itself.
        assert (await waiting).runner == "a"
        assert heir.loop.scheduler.running == 1
        # The stream that runs is not disturbed.
        await first.report_finished(Reason.UNSPECIFIED)


@pytest.mark.slow("waits for a health check")
async def test_request_waiting_at_a_resigning_leader_is_placed_by_the_next_with_its_age(tmp_path: Path) -> None:
    async with running(tmp_path) as there, there.place(a_request(1)) as first, there.place(a_request(2)) as second:
        await granted(first)
        assert (await second.next_decision()).HasField("queued")
        waiting = asyncio.create_task(granted(second))
        await there.routers["r1"].lead(False)
        heir = await there.lead("r2")
        assert (await waiting).attempt == 1
        await until(lambda: there.routers["r1"].loop.scheduler.waiting == 0)
        entries, _ = heir.records.requests.under_way(1)
        assert entries[0].spec.age_seconds > 0.0


async def test_request_arriving_without_a_leader_waits_for_the_next(tmp_path: Path) -> None:
    async with running(tmp_path) as there:
        link = there.placement.leader
        assert link is not None
        await there.routers["r1"].kill()
        link.note_lost()
        async with there.place(a_request()) as place:
            waiting = asyncio.create_task(granted(place))
            done, _ = await asyncio.wait([waiting], timeout=0.2)
            assert not done, "nobody could grant it"
            heir = await there.lead("r3")
            await waiting
            assert heir.loop.scheduler.running == 1


async def test_later_of_two_claimed_leaders_is_used(tmp_path: Path) -> None:
    """As a leader that was frozen and thaws: it says so until it has read that another one leads."""
    async with running(tmp_path) as there:
        await there.routers["r2"].lead()
        await until(lambda: there.placement.leader is not None and there.placement.leader.router.name == "r2")
        async with there.place(a_request()) as place:
            await granted(place)
            assert there.routers["r2"].loop.scheduler.running == 1


async def test_configured_router_places_requests_before_any_router_is_announced(tmp_path: Path) -> None:
    async with running(tmp_path) as there:
        there.show()
        async with there.place(a_request()) as place:
            await granted(place)
            assert there.routers["r1"].loop.scheduler.running == 1


def place_at(address: str) -> RemotePlace:
    """A placement at a router there."""
    return RemoteRouter(grpc.aio.insecure_channel(address), CLOCK).place(a_request())


@contextmanager
def silent_router(folder: Path) -> Iterator[str]:
    """The address of a router that accepts connections and says nothing, as a frozen one."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "silent.sock"))
        listening.listen()
        yield f"unix:{folder / 'silent.sock'}"


@pytest.mark.parametrize("is_abandoned", [True, False])
async def test_placement_with_a_broken_connection_is_lost_rather_than_cancelled(is_abandoned: bool) -> None:
    place = place_at("unix:/nowhere")
    async with place:
        if is_abandoned:
            place.abandon()
        with refused(Reason.NO_ROUTER_AVAILABLE):
            await place.next_decision()


async def test_placement_with_a_closed_channel_is_lost_and_its_task_continues(tmp_path: Path) -> None:
    with silent_router(tmp_path) as address:
        router = RemoteRouter(grpc.aio.insecure_channel(address), CLOCK)
        async with router.place(a_request()) as place:
            waiting = asyncio.create_task(place.next_decision())
            await asyncio.sleep(0)
            await router.channel.close(None)
            with refused(Reason.NO_ROUTER_AVAILABLE):
                await waiting
            await place.report_first_content(1)
            assert not await place.report_finished(Reason.UNSPECIFIED)


async def test_placement_that_its_deadline_ended_is_no_end_that_a_router_knows(tmp_path: Path) -> None:
    """Its end was not reported to the next leader."""
    with silent_router(tmp_path) as address:
        router = RemoteRouter(grpc.aio.insecure_channel(address), CLOCK)
        async with router.place(a_request(seconds_left=0.01)) as place:
            with refused(Reason.DEADLINE_EXCEEDED):
                await place.next_decision()
            assert not await place.report_finished(Reason.DEADLINE_EXCEEDED)
            assert not router.is_lost


async def test_router_that_refuses_the_gateway_is_not_told_as_one_that_does_not_answer() -> None:
    async with served() as channel:
        router = RemoteRouter(channel, CLOCK)
        async with router.place(a_request()) as place:
            with refused(Reason.UNSUPPORTED_OPERATION):
                await place.next_decision()
        assert not router.is_lost


async def test_cancelling_the_task_of_a_placement_ends_it(tmp_path: Path) -> None:
    with silent_router(tmp_path) as address:
        async with place_at(address) as place:
            waiting = asyncio.create_task(place.next_decision())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting


async def test_placement_at_a_frozen_router_is_lost_with_it(tmp_path: Path) -> None:
    with silent_router(tmp_path) as address:
        router = RemoteRouter(grpc.aio.insecure_channel(address), CLOCK)
        async with router.place(a_request()) as place:
            waiting = asyncio.create_task(place.next_decision())
            await asyncio.sleep(0.05)
            assert not waiting.done()
            router.note_lost()
            with refused(Reason.NO_ROUTER_AVAILABLE):
                await waiting


async def test_request_is_placed_by_the_next_leader_if_its_leader_leaves_during_placement(tmp_path: Path) -> None:
    async with running(tmp_path) as there, asyncio.timeout(10):
        place = there.place(a_request())
        # Its channel is closed before the call begins.
        there.show("r2", "r3")
        await there.lead("r2")
        async with place:
            assert (await granted(place)).runner == "a"


async def test_closed_link_does_not_become_the_leader_by_its_last_health_check() -> None:
    """A router restarts: the old link's check is answered in the moment in which the view replaces that link."""
    configured = grpc.aio.insecure_channel("unix:/nowhere")
    placement = LeaderPlacement(configured, "unix:/nowhere", CLOCK)
    first, second = (RegisteredRouter(name="r1", incarnation=each, address="unix:/nowhere") for each in "12")
    placement.update_view(mesh(1, {"r1": first}))
    old = next(iter(placement._links.values()))
    answer = asyncio.get_running_loop().create_future()
    old._health = cast("Any", SimpleNamespace(Check=lambda *_, **__: answer))
    await asyncio.sleep(0)
    answer.set_result(health_pb2.HealthCheckResponse(status=SERVING))
    placement.update_view(mesh(1, {"r1": second}))
    await asyncio.sleep(0)
    assert placement.leader is not old
    await placement.close()
    await configured.close()


async def test_router_that_still_leads_is_used_when_a_later_claim_ends() -> None:
    """A frozen leader thaws, claims to lead until it reads that its heir does, and then steps down."""
    configured = grpc.aio.insecure_channel("unix:/nowhere")
    placement = LeaderPlacement(configured, "unix:/nowhere", CLOCK)
    routers = {name: RegisteredRouter(name=name, incarnation="1", address="unix:/nowhere") for name in ("r1", "r2")}
    placement.update_view(mesh(1, routers))
    heir, thawed = placement._links["r2"], placement._links["r1"]
    await claimed_by(heir, placement)
    await claimed_by(thawed, placement)
    leaders = []
    for link in (thawed, heir):
        link.note_lost()
        leaders.append(placement.leader)
    assert leaders == [heir, None]
    await placement.close()
    await configured.close()


async def claimed_by(link: RemoteRouter, placement: LeaderPlacement) -> None:
    async def serving(*_: object, **__: object) -> health_pb2.HealthCheckResponse:
        return health_pb2.HealthCheckResponse(status=SERVING)

    link._health = cast("Any", SimpleNamespace(Check=serving))
    link.hurry()
    await until(lambda: placement.leader is link)
