"""Leases: who has a task, who has lost it, and what a lost one's result is worth."""

import asyncio
from collections.abc import Callable

import pytest
from task_harness import TENANT, ScriptedCall, TaskBench, task_bench, text

from router_svc.durable.limits import TaskLimits
from router_svc.durable.tasks.task_media import WRITE_PATIENCE_SECONDS
from router_svc.durable.tasks.task_records import ManyChanged, StoreEvent, TaskChanged, TaskLease
from weft.api.router.v1 import task_pb2
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import Clock


def now_of(clock: Clock) -> float:
    return clock.utc_now().timestamp()


async def left(call: ScriptedCall) -> None:
    async with asyncio.timeout(10):
        await call.left.wait()


async def take_over(bench: TaskBench, task_id: str) -> TaskLease:
    """Another router believes that this one is gone, and begins the task itself."""
    now = now_of(bench.clock)
    await bench.store.revert_expired(now + 1000, 1)
    claim = await bench.store.claim(task_id, "router-other", now, now + 100)
    assert claim is not None
    return claim


async def test_heartbeat_keeps_the_claim_of_a_long_answer() -> None:
    async with task_bench() as bench:
        task, call = await bench.begun()
        await bench.advance(600)
        assert not call.left.is_set()
        call.finish()
        assert (await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)).attempt == 1


async def test_renewal_slower_than_the_lease_does_not_restart_local_work() -> None:
    async with task_bench() as bench:
        task, call = await bench.begun()
        bench.store.renewals_answer_late = late = asyncio.Event()
        await bench.advance(600)
        late.set()
        await bench.advance(20)
        assert not call.left.is_set()
        call.finish()
        assert (await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)).attempt == 1
        assert len(bench.calls.made) == 1


async def test_lost_lease_ends_the_work_and_discards_its_late_result() -> None:
    async with task_bench() as bench:
        task, call = await bench.begun()
        other = await take_over(bench, task.id)
        await bench.advance(6)
        await left(call)
        running = await bench.get(task.id)
        assert (running.state, running.owner, running.attempt) == (
            task_pb2.TASK_STATE_RUNNING,
            "router-other",
            other.attempt,
        )
        assert not bench.store.ended


async def test_late_result_is_discarded_by_fencing_even_before_a_heartbeat() -> None:
    async with task_bench() as bench:
        task, call = await bench.begun()
        await take_over(bench, task.id)
        call.finish()
        await left(call)
        await bench.settle()
        ((claim, _, counted),) = bench.store.ended
        assert (claim.attempt, counted) == (1, False)
        assert (await bench.get(task.id)).owner == "router-other"


async def test_stale_chunk_ends_the_work_immediately() -> None:
    async with task_bench() as bench:
        task, call = await bench.begun()
        await take_over(bench, task.id)
        call.say(text("late"))
        await bench.advance(0.25)
        await left(call)
        assert not bench.store.pieces(task.id)


async def test_leases_of_a_lost_router_are_reclaimed_and_their_tasks_restart() -> None:
    async with task_bench() as bench, task_bench(clock=bench.clock, store=bench.store) as gone:
        await bench.service.stop(0)
        task, call = await gone.begun()
        heart = gone.service.engine._loops[0]
        heart.cancel()
        async with task_bench(clock=bench.clock, store=bench.store) as next_life:
            await bench.advance(14)
            assert (await next_life.get(task.id)).attempt == 1
            await bench.advance(6)
            again = await next_life.calls.next()
            await again.grant()
            again.finish()
            done = await next_life.until(task.id, task_pb2.TASK_STATE_COMPLETED)
            assert done.attempt == 2
            assert await next_life.attempts(task.id) == ["WORKER_LOST", "UNSPECIFIED"]
            # The first one comes back from its pause, and has a result.
            call.finish()
            await left(call)
            await next_life.settle()
            assert [counted for _, _, counted in bench.store.ended] == [True, False]


async def test_task_fails_if_its_last_attempt_loses_its_lease() -> None:
    async with task_bench(limits=TaskLimits(max_attempts=1)) as bench:
        task = await bench.submit()
        call = await bench.calls.next()
        assert await bench.store.claim(task.id, "router-gone", now_of(bench.clock), now_of(bench.clock) + 15)
        await bench.advance(20)
        failed = await bench.get(task.id)
        assert (failed.state, Reason(failed.error.reason).name) == (task_pb2.TASK_STATE_FAILED, "WORKER_LOST")
        call.granted.set()
        await left(call)
        assert not call.claimed.is_set()


@pytest.mark.parametrize("event", [TaskChanged, lambda _: ManyChanged()], ids=["of the task", "of many tasks"])
async def test_cancel_through_another_router_reaches_the_work_by_event(event: Callable[[str], StoreEvent]) -> None:
    async with task_bench() as bench:
        task, call = await bench.begun()
        await bench.store.cancel(TENANT, task.id, now_of(bench.clock))
        bench.service.events.publish(event(task.id))
        await bench.advance(0.1)
        await left(call)
        assert (await bench.get(task.id)).state == task_pb2.TASK_STATE_CANCELLED


async def test_cancel_with_a_lost_event_reaches_the_work_at_the_next_renewal() -> None:
    async with task_bench() as bench:
        task, call = await bench.begun()
        # The first task that runs asks for a renewal.
        await bench.advance(1)
        await bench.store.cancel(TENANT, task.id, now_of(bench.clock))
        await bench.advance(1)
        assert not call.left.is_set()
        await bench.advance(5)
        await left(call)


async def test_result_waits_for_a_database_locked_longer_than_the_lease() -> None:
    async with task_bench() as bench:
        task, call = await bench.begun()
        call.say(text("half"))
        await bench.advance(1)
        bench.store.database.is_failing = True
        call.say(text(" and all"))
        call.finish()
        await bench.advance(20)
        bench.store.database.is_failing = False
        await bench.advance(3)
        done = await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
        assert done.attempt == 1
        assert len(bench.calls.made) == 1
        (piece_one, *rest) = await bench.store.chunks(task.id, 1, 0, 1 << 20)
        words = [event.delta.text for chunk in (piece_one, *rest) for event in chunk.output.events]
        assert words == ["half", " and all", ""]


async def test_result_that_could_not_be_stored_is_dropped_and_the_task_restarts() -> None:
    async with task_bench() as bench:
        task, call = await bench.begun()
        bench.store.database.is_failing = True
        call.finish()
        await bench.advance(WRITE_PATIENCE_SECONDS + 10)
        bench.store.database.is_failing = False
        # The claim is still this router's in the database, and nothing runs under it: it is given back.
        await bench.advance(5)
        again = await bench.calls.next()
        await again.grant()
        again.finish()
        done = await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
        assert done.attempt == 2
        assert [counted for _, _, counted in bench.store.ended] == [True]


async def test_runner_output_buffering_is_bounded_while_the_database_fails() -> None:
    async with task_bench(limits=TaskLimits(max_piece_bytes=100)) as bench:
        _, call = await bench.begun()
        bench.store.database.is_failing = True
        for _ in range(50):
            call.say(text("x" * 60))
        await bench.advance(5)
        assert call.words.qsize() >= 47
        bench.store.database.is_failing = False
        await bench.advance(3)
        assert call.words.qsize() == 0


async def test_late_acknowledged_claim_is_not_treated_as_stray() -> None:
    async with task_bench() as bench:
        bench.store.claims_answer_late = late = asyncio.Event()
        task = await bench.submit()
        call = await bench.calls.next()
        call.granted.set()
        await bench.advance(12)
        assert bench.store.row(task.id).state == task_pb2.TASK_STATE_RUNNING
        late.set()
        async with asyncio.timeout(10):
            await call.claimed.wait()
        call.finish()
        assert (await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)).attempt == 1


async def test_unacknowledged_claim_is_released_and_does_not_count_as_an_attempt() -> None:
    async with task_bench(limits=TaskLimits(max_attempts=1)) as bench:
        task = await bench.submit()
        call = await bench.calls.next()
        owner = bench.service.engine._deps.owner
        # The claim is on disk, and its acknowledgement was lost with the connection.
        assert await bench.store.claim(task.id, owner, now_of(bench.clock), now_of(bench.clock) + 15)
        call.granted.set()
        await left(call)
        await bench.advance(6)
        again = await bench.calls.next()
        await again.grant()
        again.finish()
        assert (await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)).attempt == 2
        assert bench.store.row(task.id).failures == 0
