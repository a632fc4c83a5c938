"""What was written while a clock was ahead does not lie further off than it can, on every kind of database."""

import pytest
from stored_batches import DAY_SECONDS, NEW_FILE, content, line, lines, running
from stored_tasks import DONE, LEASE, NOW, a_task, begun, claimed, reverted, seen, store_on, waiting

from router_svc.durable.limits import ResponseLimits
from router_svc.durable.stored_responses import ResponseService
from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.store.database import RouterDatabase
from weft.api.router.v1 import stored_response_service_pb2, task_pb2
from weft.durable.tasks import task_error
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import CLOCK_MARGIN_SECONDS
from weft.kernel.time.timestamps import datetime_of, optional_datetime, stamp_of
from weft_testing.fake_clock import FakeClock

pytest_plugins = ("database_fixtures", "task_store_fixtures")

HOUR = 3600.0
BACK = NOW - HOUR
"""What time it really is, where everything was written at NOW."""
LONGEST_PAUSE, LIMIT = 60.0, 100
SWEEP_SECONDS = 300.0


async def _back(kept: SqlTaskStore, now: float = BACK) -> int:
    return await kept.bring_back(now, LONGEST_PAUSE, LIMIT)


async def test_lease_beyond_its_length_expires_within_its_length_after_the_clock_is_set_back(
    kept: SqlTaskStore,
) -> None:
    claim = await begun(kept, "task-1")
    assert await _back(kept) == 1
    assert await kept.revert_expired(BACK + LEASE - 1, 10) == ()
    (lost,) = await kept.revert_expired(BACK + LEASE, 10)
    assert lost.claim == claim
    assert (await seen(kept, "task-1")).state == task_pb2.TASK_STATE_PENDING


async def test_longer_lease_of_another_router_is_not_moved(kept: SqlTaskStore) -> None:
    await kept.submit(a_task("task-1"))
    assert await kept.claim("task-1", "r2", NOW, NOW + HOUR) is not None
    assert await _back(kept, NOW) == 0


async def test_clock_differences_within_the_margin_move_nothing(kept: SqlTaskStore) -> None:
    await begun(kept, "task-1")
    await begun(kept, "task-2")
    await kept.submit(a_task("task-3"))
    claim = await begun(kept, "task-4")
    assert await kept.end(claim, DONE, NOW)
    assert await _back(kept, NOW - CLOCK_MARGIN_SECONDS) == 0


async def test_backoff_is_capped_at_the_maximum_after_the_clock_is_set_back(kept: SqlTaskStore) -> None:
    claim = await begun(kept, "task-1")
    assert await reverted(kept, claim, ready_at=NOW + 1)
    assert not await waiting(kept, now=BACK + LONGEST_PAUSE)
    assert await _back(kept) == 2
    assert [task.id for task in await waiting(kept, now=BACK + LONGEST_PAUSE)] == ["task-1"]


async def test_bug_pause_that_a_provider_asked_for_was_a_clock_set_back(kept: SqlTaskStore) -> None:
    limited = task_error(Reason.RATE_LIMIT_EXCEEDED, "30 requests per minute")
    claim = await begun(kept, "task-1")
    assert await kept.revert(claim, limited, receipt=b"", counts=False, now=NOW, ready_at=NOW + HOUR)
    assert await _back(kept, NOW) == 0
    assert await _back(kept) > 0
    assert [task.id for task in await waiting(kept, now=BACK + HOUR - 1)] == []


async def test_pending_limit_applies_after_the_clock_is_set_back(kept: SqlTaskStore) -> None:
    await kept.submit(a_task("task-1", pending_limit_seconds=600.0))
    assert await _back(kept) == 1
    assert await kept.fail_expired(BACK + 599.0, 10, {}) == []
    assert await kept.fail_expired(BACK + 600.0, 10, {}) == ["task-1"]


async def test_task_that_ended_in_the_future_is_purged_after_the_normal_retention(kept: SqlTaskStore) -> None:
    claim = await begun(kept, "task-1")
    assert await kept.end(claim, DONE, NOW)
    assert await _back(kept) == 1
    ended_at = optional_datetime(await seen(kept, "task-1"), "end_time")
    assert ended_at is not None
    assert ended_at.timestamp() == BACK
    assert len(await kept.purge_ended(BACK + 1.0, 10)) == 1


async def test_repair_is_limited_per_call_and_moved_times_stay(kept: SqlTaskStore) -> None:
    for number in range(3):
        await kept.submit(a_task(f"task-{number}"))
    moved = [await kept.bring_back(BACK, LONGEST_PAUSE, 2) for _ in range(3)]
    assert moved == [2, 1, 0]
    await claimed(kept, "task-0", now=BACK)


@pytest.fixture
def clock() -> FakeClock:
    """An hour ahead until somebody sets it."""
    clock = FakeClock()
    clock.set_wall(HOUR)
    return clock


async def test_files_and_batches_expire_after_the_clock_is_set_back(database_url: str, clock: FakeClock) -> None:
    async with running(database_url, clock=clock) as world:
        await world.files.save(NEW_FILE, content(b"{}"))
        batch = await world.batches.create(world.new_batch(), lines(line("a")))
        clock.set_wall(-HOUR)
        await clock.advance(SWEEP_SECONDS, sleepers=1)
        now = clock.utc_now().timestamp()
        ((made, over),) = await world.rows("files", "created_at", "expires_at")
        assert (made, over) == (now, now + 30 * DAY_SECONDS)
        assert await world.rows("batches", "created_at") == [(now,)]
        moved = await world.batches.get("ann", batch.id)
        assert (moved.create_time, moved.window_end_time) == (stamp_of(now), stamp_of(now + DAY_SECONDS))


async def test_batch_lines_end_with_the_batch_window(database_url: str, clock: FakeClock) -> None:
    async with running(database_url, clock=clock) as world:
        await world.batches.create(world.new_batch(), lines(line("a")))
        clock.set_wall(-HOUR)
        store = store_on(database_url)
        await store.start()
        now = clock.utc_now().timestamp()
        assert await store.bring_back(now, LONGEST_PAUSE, LIMIT) == 1
        ends = now + DAY_SECONDS
        assert await world.rows("tasks", "window_ends_at", "expires_at") == [(ends, ends)]
        await store.stop()


async def test_answer_stored_in_the_future_is_purged_after_the_normal_retention(
    database_url: str, clock: FakeClock
) -> None:
    service = ResponseService(
        RouterDatabase(database_url), ResponseLimits(keep_seconds=60.0, sweep_interval_seconds=10.0), clock=clock
    )
    await service.start()
    made = clock.utc_now()
    await service.store.save(
        stored_response_service_pb2.StoredResponse(
            id="resp_1", tenant="ann", previous_id="", create_time=stamp_of(made), body=b"{}", items=b"[]"
        )
    )
    clock.set_wall(-HOUR)
    await clock.advance(10.0, sleepers=1)
    assert datetime_of((await service.store.get("ann", "resp_1")).create_time) <= clock.utc_now()
    await clock.advance(80.0, sleepers=1)
    with pytest.raises(WeftError):
        await service.store.get("ann", "resp_1")
    await service.stop(0)
