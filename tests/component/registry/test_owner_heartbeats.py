"""The heartbeats of an owner, and the calls that it refuses once it may have been replaced."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kit.refusals import refused
from typing_extensions import override

from registry_svc.store.database import REGISTRY_OWNER
from weft.kernel.channels.rpc import open_channel
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.health import WELL, HealthCheck, HealthState, Observation
from weft.kernel.services.health_monitor import HealthMonitor
from weft.kernel.services.service_lifecycle import CRITICAL_TASK
from weft.sql.ownership import (
    FILES_CHECK_SECONDS,
    INTERVAL_SECONDS,
    LEASE_SHARE,
    OwnerHeartbeats,
    StandbyPair,
    write_check,
)
from weft_app.compose.grpc_host import GrpcHost
from weft_testing.fake_clock import FakeClock, let_all_run

if TYPE_CHECKING:
    from pathlib import Path

    from weft.sql.standby import OwnerWatch

SILENCE = 10.0
LEASE = LEASE_SHARE * SILENCE
WAIT_SECONDS = 20.0
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class BeatenDatabase:
    """A database that takes heartbeats, or fails."""

    may_have_standby = True

    def __init__(self) -> None:
        self.heartbeats = 0
        self.has_standby = False
        self.error: WeftError | None = None

    async def beat(self) -> bool:
        if self.error is not None:
            raise self.error
        self.heartbeats += 1
        return self.has_standby


def seen(check: HealthCheck) -> Observation:
    found = check.probe()
    assert isinstance(found, Observation)
    return found


class BareRegistry:
    """What an owner runs, without a registry in it."""

    service_names = ("weft.api.registry.v1.RegistryService",)

    def __init__(self, heartbeats: OwnerHeartbeats) -> None:
        self.heartbeats = heartbeats
        self.owned_elsewhere = False
        self.unfit: WeftError | None = None
        self.starts = 0

    def health_checks(self) -> tuple[()]:
        return ()

    async def require_files(self, database: object) -> None:
        del database
        if self.unfit is not None:
            raise self.unfit

    def register(self, server: object) -> None:
        """Adds nothing: its health is asked for alone."""

    async def start(self) -> None:
        if self.owned_elsewhere:
            raise WeftError(Reason.ALREADY_EXISTS, "another registry runs on this database")
        self.starts += 1
        await self.heartbeats.start()

    async def stop(self, grace_seconds: float) -> None:
        del grace_seconds
        await self.heartbeats.stop()


class Turn:
    """A watch whose owner ends when a test says so."""

    owner_address = "127.0.0.1:7070"

    def __init__(self) -> None:
        self.free = asyncio.Event()

    async def until_free(self) -> None:
        await self.free.wait()
        self.free.clear()

    def database(self) -> "nullcontext[None]":
        return nullcontext()


class ThawingClock(FakeClock):
    """A clock on which a process may have been frozen: time has passed, and no timer has fired yet."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen_seconds = 0.0

    @override
    def monotonic(self) -> float:
        return super().monotonic() + self.frozen_seconds


class Stage:
    """Heartbeats on a fake clock."""

    def __init__(self) -> None:
        self.clock = ThawingClock()
        self.database = BeatenDatabase()
        self.returns = 0
        self.heartbeats = OwnerHeartbeats(
            cast("Any", self.database), REGISTRY_OWNER, self.clock, SILENCE, self._note_return
        )

    def _note_return(self) -> None:
        self.returns += 1

    async def pass_seconds(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            await self.clock.advance(1.0)
            await let_all_run()


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    await stage.heartbeats.start()
    await let_all_run()
    try:
        yield stage
    finally:
        await stage.heartbeats.stop()


async def test_owner_writes_a_heartbeat_every_second(stage: Stage) -> None:
    before = stage.database.heartbeats
    await stage.pass_seconds(10)
    assert stage.database.heartbeats == before + 10


async def test_owner_without_a_standby_continues_while_its_database_is_unavailable(stage: Stage) -> None:
    stage.database.error = WeftError(Reason.SERVICE_UNAVAILABLE, "away")
    await stage.pass_seconds(60)
    assert stage.heartbeats.is_current


async def test_owner_with_a_standby_stops_serving_before_its_lease_ends_and_returns_with_grace(stage: Stage) -> None:
    stage.database.has_standby = True
    await stage.pass_seconds(1)
    stage.database.error = WeftError(Reason.SERVICE_UNAVAILABLE, "away")
    await stage.pass_seconds(LEASE - 1)
    states = [stage.heartbeats.is_current]
    await stage.pass_seconds(1)
    states.append(stage.heartbeats.is_current)
    assert stage.returns == 0
    stage.database.error = None
    await stage.pass_seconds(1)
    assert [*states, stage.heartbeats.is_current] == [True, False, True]
    assert stage.returns == 1


async def test_runner_commands_wait_while_ownership_is_uncertain(stage: Stage) -> None:
    stage.database.has_standby = True
    await stage.pass_seconds(1)
    await asyncio.wait_for(stage.heartbeats.until_current(), 1.0)
    stage.database.error = WeftError(Reason.SERVICE_UNAVAILABLE, "away")
    await stage.pass_seconds(LEASE)
    command = asyncio.create_task(stage.heartbeats.until_current())
    await stage.pass_seconds(30)
    assert not command.done()
    stage.database.error = None
    await stage.pass_seconds(2)
    assert command.done()


async def test_short_database_outage_adds_no_grace(stage: Stage) -> None:
    stage.database.has_standby = True
    await stage.pass_seconds(1)
    stage.database.error = WeftError(Reason.SERVICE_UNAVAILABLE, "away")
    await stage.pass_seconds(3)
    stage.database.error = None
    await stage.pass_seconds(1)
    assert stage.returns == 0


async def test_replaced_owner_answers_nothing_and_exits(stage: Stage) -> None:
    deaths = list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: deaths.append(context[CRITICAL_TASK]))
    stage.database.error = REGISTRY_OWNER.taken_over()
    await stage.pass_seconds(1)
    assert not stage.heartbeats.is_current
    assert deaths == ["registry-owner"]


async def test_standby_rejects_calls_with_the_owner_address_until_takeover() -> None:
    stage = Stage()
    registry, turn, told = BareRegistry(stage.heartbeats), Turn(), list[str]()
    registry.owned_elsewhere = True
    paired = StandbyPair(cast("Any", registry), REGISTRY_OWNER, cast("OwnerWatch", turn), stage.clock)

    async def note() -> None:
        told.append("owner")

    paired.on_takeover(note)
    await paired.start()
    (check,) = paired.health_checks()
    with refused(Reason.REGISTRY_STANDBY) as errors:
        paired.require_owner()
    assert errors[0].metadata == {"address": "127.0.0.1:7070"}
    assert seen(check).state is HealthState.DOWN
    # The lock was free, and another one was quicker.
    turn.free.set()
    await stage.pass_seconds(2)
    assert registry.starts == 0
    registry.owned_elsewhere = False
    turn.free.set()
    await let_all_run()
    paired.require_owner()
    assert seen(check).state is HealthState.OK
    assert (registry.starts, told) == (1, ["owner"])
    await paired.stop(0.0)


async def test_standby_with_unauthenticated_callers_reveals_no_address() -> None:
    stage = Stage()
    registry = BareRegistry(stage.heartbeats)
    registry.owned_elsewhere = True
    paired = StandbyPair(
        cast("Any", registry), REGISTRY_OWNER, cast("OwnerWatch", Turn()), stage.clock, names_owner=False
    )
    await paired.start()
    with pytest.raises(WeftError) as refused:
        paired.require_owner()
    assert refused.value.metadata == {}
    assert "7070" not in refused.value.message
    assert "name both in WEFT_REGISTRY" in refused.value.message
    await paired.stop(0.0)


async def test_standby_without_the_owners_files_does_not_start() -> None:
    stage = Stage()
    registry = BareRegistry(stage.heartbeats)
    registry.owned_elsewhere = True
    registry.unfit = WeftError(Reason.INVALID_ARGUMENT, "another pepper")
    with pytest.raises(WeftError, match="copy the file from the owner's machine: another pepper") as refused:
        await StandbyPair(cast("Any", registry), REGISTRY_OWNER, cast("OwnerWatch", Turn()), stage.clock).start()
    assert refused.value.reason is Reason.INVALID_ARGUMENT


async def test_standby_reports_a_first_key_created_with_another_pepper() -> None:
    stage = Stage()
    registry = BareRegistry(stage.heartbeats)
    registry.owned_elsewhere = True
    # The database is away: nothing is known of its keys.
    registry.unfit = WeftError(Reason.SERVICE_UNAVAILABLE, "away")
    paired = StandbyPair(cast("Any", registry), REGISTRY_OWNER, cast("OwnerWatch", Turn()), stage.clock)
    await paired.start()
    await let_all_run()
    (check,) = paired.health_checks()
    reasons = [seen(check).reason]
    for unfit in (WeftError(Reason.INVALID_ARGUMENT, "another pepper"), None):
        registry.unfit = unfit
        await stage.pass_seconds(FILES_CHECK_SECONDS)
        reasons.append(seen(check).reason)
    assert reasons == ["standby", "standby_unfit", "standby"]
    await paired.stop(0.0)


async def test_second_registry_fails_to_start_on_a_database_without_standby_support() -> None:
    stage = Stage()
    registry = BareRegistry(stage.heartbeats)
    registry.owned_elsewhere = True
    with refused(Reason.ALREADY_EXISTS):
        await StandbyPair(cast("Any", registry), REGISTRY_OWNER, None, stage.clock).start()


@pytest.mark.parametrize("waits", [True, False])
async def test_owner_detects_whether_a_standby_is_waiting(stage: Stage, *, waits: bool) -> None:
    stage.database.has_standby = not waits
    await stage.pass_seconds(2.0)
    assert stage.heartbeats.sees_standby is not waits
    stage.database.has_standby = waits
    await stage.pass_seconds(2.0)
    assert stage.heartbeats.sees_standby is waits


class ServedOwner:
    """An owner on a server, whose health is asked for and watched as clients do."""

    def __init__(self, stage: Stage, channel: grpc.aio.Channel) -> None:
        self.stage = stage
        self._health: Any = health_pb2_grpc.HealthStub(channel)

    async def checked(self) -> list[int]:
        """What it answers for its readiness and for a service."""
        asked = [health_pb2.HealthCheckRequest(service=name) for name in ("readiness", *BareRegistry.service_names)]
        return [(await self._health.Check(each, timeout=WAIT_SECONDS)).status for each in asked]

    def watch(self) -> Any:
        """A watch of its readiness, as the channel of a client over both registries begins it."""
        return self._health.Watch(health_pb2.HealthCheckRequest(service="readiness"), timeout=WAIT_SECONDS)


@pytest.fixture
async def served(tmp_path: "Path") -> AsyncIterator[ServedOwner]:
    stage = Stage()
    stage.database.has_standby = True
    paired = StandbyPair(
        cast("Any", BareRegistry(stage.heartbeats)), REGISTRY_OWNER, cast("OwnerWatch", Turn()), stage.clock
    )
    host, monitor = GrpcHost(clock=stage.clock), HealthMonitor(paired.health_checks(), stage.clock)
    address = host.bind(f"unix:{tmp_path}/registry.sock")
    await host.start([paired], monitor)
    await stage.pass_seconds(2)
    try:
        async with open_channel(address) as channel:
            yield ServedOwner(stage, channel)
    finally:
        await host.stop(0.0)


async def test_thawed_owner_serves_no_caller_before_its_next_check(served: ServedOwner) -> None:
    """A client that connects in that moment would leave the new owner for it."""
    before = served.watch()
    assert (await before.read()).status == SERVING
    rounds = served.stage.database.heartbeats
    served.stage.clock.frozen_seconds = LEASE
    after = served.watch()
    assert (await after.read()).status == NOT_SERVING
    assert await served.checked() == [NOT_SERVING, NOT_SERVING]
    assert served.stage.database.heartbeats == rounds
    # Those who watched are told with the next round, and all of them once a heartbeat is written again.
    served.stage.database.error = WeftError(Reason.SERVICE_UNAVAILABLE, "away")
    await served.stage.pass_seconds(1)
    assert (await before.read()).status == NOT_SERVING
    served.stage.database.error = None
    await served.stage.pass_seconds(2)
    assert [(await each.read()).status for each in (before, after)] == [SERVING, SERVING]


async def test_owner_with_an_unavailable_database_does_not_report_itself_as_standby() -> None:
    stage = Stage()
    stage.database.has_standby = True
    paired = StandbyPair(
        cast("Any", BareRegistry(stage.heartbeats)), REGISTRY_OWNER, cast("OwnerWatch", Turn()), stage.clock
    )
    await paired.start()
    await stage.pass_seconds(2)
    stage.database.error = WeftError(Reason.SERVICE_UNAVAILABLE, "away")
    await stage.pass_seconds(LEASE + 1)
    with pytest.raises(WeftError) as refused:
        paired.require_owner()
    assert (refused.value.reason, refused.value.metadata) == (Reason.REGISTRY_STANDBY, {})
    assert refused.value.message == (
        "this registry answers no calls: its database has taken no heartbeat for 9 s, so that a standby may own it by "
        "now; it answers again once its database does; call the other registry, as clients with both addresses do"
    )
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    stage.database.error = REGISTRY_OWNER.taken_over()
    await stage.pass_seconds(1)
    with pytest.raises(WeftError, match="another registry has taken over its database, and it ends; call the other"):
        paired.require_owner()
    await paired.stop(0.0)


async def test_owner_frozen_for_less_than_its_lease_continues_serving(served: ServedOwner) -> None:
    served.stage.clock.frozen_seconds = LEASE - 2.0
    assert (await served.watch().read()).status == SERVING
    assert await served.checked() == [SERVING, SERVING]


async def test_owner_without_a_standby_serves_after_any_freeze(served: ServedOwner) -> None:
    alone = Stage()
    paired = StandbyPair(cast("Any", BareRegistry(alone.heartbeats)), REGISTRY_OWNER, None, alone.clock)
    monitor = HealthMonitor(paired.health_checks(), alone.clock)
    await paired.start()
    await monitor.start()
    alone.clock.frozen_seconds = 100 * LEASE
    assert monitor.report.is_ready
    served.stage.clock.frozen_seconds = 100 * LEASE
    assert await served.checked() == [NOT_SERVING, NOT_SERVING]
    await monitor.stop()
    await paired.stop(0.0)


async def test_database_is_written_rarely_while_it_works_and_in_each_check_while_not() -> None:
    clock, codes = FakeClock(), ["", "SQLITE_FULL", "SQLITE_FULL", ""]

    async def failure() -> str:
        return codes.pop(0)

    check = write_check("store", failure, clock, services=())

    async def written() -> Observation:
        found = check.probe()
        return found if isinstance(found, Observation) else await found

    assert [await written() for _ in range(5)] == [WELL] * 5
    await clock.advance(INTERVAL_SECONDS)
    assert [(await written()).state for _ in range(3)] == [HealthState.DOWN, HealthState.DOWN, HealthState.OK]
    assert codes == []
