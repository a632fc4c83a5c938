"""Sessions of routers with a real registry, on a fake clock."""

from pathlib import Path
from typing import Any

import pytest
from kit.refusals import refused
from lease_stage import FreezingClock
from registry_harness import LOOPS, RunningRegistry, WatchReader, running_registry

from weft.api.registry.v1 import router_session_service_pb2 as pb
from weft.api.registry.v1 import router_session_service_pb2_grpc
from weft.kernel.errors.reasons import Reason

SESSION_SECONDS = 10.0


class SomeRouter:
    """What a router would send."""

    def __init__(
        self, mesh: RunningRegistry, name: str = "r1", address: str = "unix:/r1", incarnation: str = "i1"
    ) -> None:
        self._mesh = mesh
        self._stub: Any = router_session_service_pb2_grpc.RouterSessionServiceStub(mesh.channel)
        self.name, self.address, self.incarnation = name, address, incarnation

    async def register(self, *, shares_database: bool = True, leading: bool = False) -> pb.RegisterRouterResponse:
        request = pb.RegisterRouterRequest(
            name=self.name,
            incarnation=self.incarnation,
            address=self.address,
            version="1.2",
            leading=leading,
            shares_database=shares_database,
        )
        answer: pb.RegisterRouterResponse = await self._stub.RegisterRouter(request)
        return answer

    async def beat(self, *, leading: bool = False) -> None:
        await self._stub.BeatRouter(pb.BeatRouterRequest(name=self.name, incarnation=self.incarnation, leading=leading))

    async def leave(self) -> None:
        await self._stub.UnregisterRouter(pb.UnregisterRouterRequest(name=self.name, incarnation=self.incarnation))


async def pass_time(mesh: RunningRegistry, seconds: float) -> None:
    """Let time pass while there is a router: then there is one loop more that sleeps."""
    await mesh.clock.advance(seconds, sleepers=LOOPS + 1)


async def until_gone(mesh: RunningRegistry, watch: WatchReader, name: str) -> None:
    """Let the lifetime of a session pass, after which no router is left."""
    await mesh.clock.wait_for_sleepers(LOOPS + 1)
    await mesh.clock.advance(SESSION_SECONDS + 2.0, sleepers=LOOPS)
    assert await next_change(watch) == f"{name} gone"


async def next_change(watch: WatchReader) -> str:
    change = (await watch.read()).change
    if change.HasField("deleted_router"):
        return f"{change.deleted_router} gone"
    assert change.HasField("router"), change
    return f"{change.router.name} {'leads' if change.router.leading else 'there'}"


async def test_router_registers_and_watchers_are_notified(mesh: RunningRegistry) -> None:
    watch = await mesh.watch()
    answer = await SomeRouter(mesh).register()
    assert (answer.beat_interval.seconds, answer.session_lifetime.seconds) == (2, 10)
    router = (await watch.read()).change.router
    assert (router.name, router.address, router.incarnation, router.version) == ("r1", "unix:/r1", "i1", "1.2")
    assert [each.name for each in (await mesh.watch()).snapshot.snapshot.routers] == ["r1"]


async def test_silent_router_is_deleted_and_a_heartbeating_one_is_not(mesh: RunningRegistry) -> None:
    silent, alive = SomeRouter(mesh, "silent", "unix:/s"), SomeRouter(mesh, "alive", "unix:/a")
    await silent.register()
    await alive.register()
    watch = await mesh.watch()
    for _ in range(6):
        await pass_time(mesh, 2.0)
        await alive.beat()
    assert await next_change(watch) == "silent gone"
    with refused(Reason.SESSION_UNKNOWN):
        await silent.beat()
    await silent.register()
    assert await next_change(watch) == "silent there"


async def test_deregistered_router_is_deleted_unless_by_an_earlier_incarnation(mesh: RunningRegistry) -> None:
    await SomeRouter(mesh, incarnation="i1").register()
    await SomeRouter(mesh, incarnation="i2").register()
    watch = await mesh.watch()
    await SomeRouter(mesh, incarnation="i1").leave()
    with refused(Reason.SESSION_UNKNOWN):
        await SomeRouter(mesh, incarnation="i1").beat()
    await SomeRouter(mesh, incarnation="i2").beat(leading=True)
    assert await next_change(watch) == "r1 leads"
    await SomeRouter(mesh, incarnation="i2").leave()
    assert await next_change(watch) == "r1 gone"


async def test_second_router_needs_a_shared_database_and_stands_by_with_one(mesh: RunningRegistry) -> None:
    first, second = SomeRouter(mesh, "r1", "unix:/r1"), SomeRouter(mesh, "r2", "unix:/r2")
    await first.register(shares_database=False, leading=True)
    await first.register(shares_database=False, leading=True)
    with refused(Reason.ALREADY_EXISTS) as errors:
        await second.register(shares_database=False, leading=True)
    assert "router.database_url" in errors[0].message
    await second.register()


async def test_last_router_to_claim_leadership_leads(mesh: RunningRegistry) -> None:
    first, second = SomeRouter(mesh, "r1", "unix:/r1"), SomeRouter(mesh, "r2", "unix:/r2")
    await first.register(leading=True)
    await second.register()
    watch = await mesh.watch()
    await second.beat(leading=True)
    assert {await next_change(watch), await next_change(watch)} == {"r1 there", "r2 leads"}


async def test_name_of_a_router_at_another_address_is_rejected_during_its_session(mesh: RunningRegistry) -> None:
    await SomeRouter(mesh, address="unix:/here").register()
    other = SomeRouter(mesh, address="unix:/there", incarnation="i2")
    with refused(Reason.ALREADY_EXISTS) as errors:
        await other.register()
    assert "unix:/here" in errors[0].message
    assert "router.name" in errors[0].message
    await until_gone(mesh, await mesh.watch(), "r1")
    await other.register()


async def test_router_replaced_while_stopped_cannot_reclaim_its_name(mesh: RunningRegistry) -> None:
    stopped, later = SomeRouter(mesh, incarnation="i1"), SomeRouter(mesh, incarnation="i2")
    await stopped.register()
    await later.register()
    with refused(Reason.SESSION_UNKNOWN):
        await stopped.beat()
    with refused(Reason.ALREADY_EXISTS) as errors:
        await stopped.register()
    assert "end one of both" in errors[0].message
    await later.beat()
    # The name is free again when the later one has left.
    await later.leave()
    await stopped.register()
    await stopped.beat()


async def test_router_limit_is_enforced(tmp_path: Path) -> None:
    async with running_registry(tmp_path, max_routers=1) as mesh:
        await SomeRouter(mesh).register()
        with refused(Reason.TOO_MANY_RESOURCES):
            await SomeRouter(mesh, "r2", "unix:/r2").register()
        # One that comes again takes no second place.
        await SomeRouter(mesh, incarnation="i2").register()


@pytest.mark.parametrize("field", ["name", "incarnation", "address"])
async def test_registration_with_a_missing_field_is_rejected_by_its_name(mesh: RunningRegistry, field: str) -> None:
    router = SomeRouter(mesh)
    setattr(router, field, "")
    with refused(Reason.INVALID_ARGUMENT) as errors:
        await router.register()
    assert errors[0].message.startswith(field)


@pytest.mark.slow("kills or restarts a service")
async def test_sessions_survive_a_registry_restart_and_end_a_lifetime_after_it(tmp_path: Path) -> None:
    async with running_registry(tmp_path) as mesh:
        await SomeRouter(mesh).register()
        clock = mesh.clock
    # Longer than a session: no router could say anything meanwhile.
    await clock.advance(60.0)
    async with running_registry(tmp_path, clock=clock) as mesh:
        watch = await mesh.watch()
        (router,) = watch.snapshot.snapshot.routers
        assert (router.name, router.incarnation, router.address) == ("r1", "i1", "unix:/r1")
        await pass_time(mesh, SESSION_SECONDS / 2)
        await SomeRouter(mesh).beat()
        await pass_time(mesh, SESSION_SECONDS / 2)
        await SomeRouter(mesh).beat()
        await until_gone(mesh, watch, "r1")


async def test_thawed_registry_deletes_no_router_for_its_own_silence(tmp_path: Path) -> None:
    clock = FreezingClock()
    async with running_registry(tmp_path, clock=clock) as mesh:
        await SomeRouter(mesh).register()
        await mesh.clock.wait_for_sleepers(LOOPS + 1)
        clock.freeze(60.0)
        await pass_time(mesh, 2.0)
        await SomeRouter(mesh).beat()
        await pass_time(mesh, SESSION_SECONDS - 2.0)
        await SomeRouter(mesh).beat()
