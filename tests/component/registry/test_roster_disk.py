"""What the roster acknowledges is on disk, and what the disk refuses never happened."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from gated_store import GatedStore

from registry_svc.config import RegistryConfig
from registry_svc.domain import Capability, Heartbeat, Manifest, Opening, RunnerProfile
from registry_svc.roster import Roster
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation
from weft.testing.fake_clock import FakeClock

OPENING = Opening(
    request_id="open-1",
    session_id="",
    profile=RunnerProfile(name="r1", incarnation="life-1", address="a", host="h", runtime="fake", version="1"),
    capability=Capability(),
    models=(
        Manifest(name="m1", pool_name="", operations=(Operation.CHAT,), context_tokens=0, digest="", remote=False),
    ),
)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def store() -> AsyncIterator[GatedStore]:
    store = GatedStore()
    yield store
    await store.really_close()


@pytest.fixture
async def roster(store: GatedStore, clock: FakeClock) -> Roster:
    roster = Roster(store, clock, RegistryConfig(database_url="sqlite+aiosqlite://"))
    await roster.start()
    return roster


async def let_pass(seconds: float, roster: Roster, clock: FakeClock) -> None:
    """Time passes, with a sweep every five seconds but the last: that one is the test's."""
    for _ in range(int(seconds / 5.0) - 1):
        await clock.advance(5.0)
        await roster.sweep()
    await clock.advance(5.0)


async def test_a_session_is_on_disk_before_anyone_hears_of_it(roster: Roster, store: GatedStore) -> None:
    store.gate = asyncio.Event()
    opening = asyncio.create_task(roster.open_session(OPENING))
    await store.waiting.wait()
    assert not opening.done()
    assert roster.runner("r1") is None
    store.gate.set()
    session = await opening
    assert [stored.session for stored in await store.load()] == [session]


async def test_a_session_that_the_disk_refuses_never_was(roster: Roster, store: GatedStore) -> None:
    store.failing = True
    before, _ = roster.watch()
    with pytest.raises(WeftError) as failure:
        await roster.open_session(OPENING)
    assert failure.value.reason is Reason.SERVICE_UNAVAILABLE
    assert roster.runner("r1") is None
    assert roster.watch()[0].revision == before.revision


async def test_a_caller_that_leaves_during_the_commit_does_not_part_memory_from_disk(
    roster: Roster, store: GatedStore
) -> None:
    store.gate = asyncio.Event()
    opening = asyncio.create_task(roster.open_session(OPENING))
    await store.waiting.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    store.gate.set()
    # The next write waits for the one before it, so this repeat finds what the first call did.
    session = await roster.open_session(OPENING)
    assert [stored.session for stored in await store.load()] == [session]
    assert roster.model("m1") is not None


async def test_two_who_ask_for_one_name_at_once_do_not_both_get_it(roster: Roster) -> None:
    other = Opening(
        request_id="open-2",
        session_id="",
        profile=RunnerProfile(name="r2", incarnation="life-2", address="a", host="", runtime="", version=""),
        capability=Capability(),
        models=OPENING.models,
    )
    results = await asyncio.gather(roster.open_session(OPENING), roster.open_session(other), return_exceptions=True)
    assert isinstance(results[1], WeftError)
    assert results[1].reason is Reason.ALREADY_EXISTS


async def test_a_good_bye_that_the_disk_refuses_is_not_acknowledged(roster: Roster, store: GatedStore) -> None:
    session = await roster.open_session(OPENING)
    store.failing = True
    with pytest.raises(WeftError):
        await roster.close_session(session.id, session.incarnation)
    runner = roster.runner("r1")
    assert runner is not None
    assert runner.active


async def test_heartbeats_write_at_most_once_a_minute(roster: Roster, store: GatedStore, clock: FakeClock) -> None:
    session = await roster.open_session(OPENING)
    store.writes = 0
    for number in range(120):
        await clock.advance(5.0)
        await roster.hear(
            Heartbeat(session_id=session.id, incarnation="life-1", sequence=number, capability=Capability())
        )
        await roster.sweep()
    assert store.writes == 10
    (stored,) = await store.load()
    assert stored.pulse.last_heartbeat_at == clock.utc_now()


async def test_silence_is_told_even_while_the_disk_fails_and_written_when_it_works_again(
    roster: Roster, store: GatedStore, clock: FakeClock
) -> None:
    await roster.open_session(OPENING)
    store.failing = True
    await let_pass(90.0, roster, clock)
    with pytest.raises(WeftError):
        await roster.sweep()
    runner = roster.runner("r1")
    assert runner is not None
    assert not runner.active
    store.failing = False
    await roster.sweep()
    (stored,) = await store.load()
    assert stored.pulse.inactive_since == clock.utc_now()


async def test_a_runner_that_the_disk_cannot_forget_is_forgotten_later(
    roster: Roster, store: GatedStore, clock: FakeClock
) -> None:
    await roster.open_session(OPENING)
    await let_pass(90.0, roster, clock)
    await roster.sweep()
    await let_pass(14_400.0, roster, clock)
    store.failing = True
    with pytest.raises(WeftError):
        await roster.sweep()
    assert roster.runner("r1") is not None
    store.failing = False
    await roster.sweep()
    assert roster.runner("r1") is None
    assert await store.load() == []


async def test_a_registry_that_was_frozen_gives_everyone_time_to_be_heard_again(
    roster: Roster, clock: FakeClock
) -> None:
    await roster.open_session(OPENING)
    await clock.advance(600.0)
    await roster.sweep()
    runner = roster.runner("r1")
    assert runner is not None
    assert runner.active
    await let_pass(90.0, roster, clock)
    await roster.sweep()
    runner = roster.runner("r1")
    assert runner is not None
    assert not runner.active


async def test_a_sweep_that_is_merely_late_expires_who_is_due(roster: Roster, clock: FakeClock) -> None:
    await roster.open_session(OPENING)
    await let_pass(50.0, roster, clock)
    await clock.advance(40.0)
    await roster.sweep()
    runner = roster.runner("r1")
    assert runner is not None
    assert not runner.active


async def test_stopping_with_a_broken_disk_still_stops(roster: Roster, store: GatedStore) -> None:
    await roster.open_session(OPENING)
    store.failing = True
    await roster.stop(grace_seconds=1.0)
    with pytest.raises(WeftError) as refusal:
        roster.runner("r1")
    assert refusal.value.reason is Reason.SHUTTING_DOWN


async def test_stopping_waits_for_a_write_in_progress_and_cancels_it_after_the_grace(
    roster: Roster, store: GatedStore
) -> None:
    store.gate = asyncio.Event()
    opening = asyncio.create_task(roster.open_session(OPENING))
    await store.waiting.wait()
    stopping = asyncio.create_task(roster.stop(grace_seconds=0.01))
    with pytest.raises(WeftError) as refusal:
        await opening
    assert refusal.value.reason is Reason.SHUTTING_DOWN
    store.gate.set()
    await stopping
    assert await store.load() == []
