"""No task waits for the next look while a slot could be had; and nothing is said of one that is not so."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from inline_task_store import InlineTaskStore
from kit.refusals import refused
from task_harness import FINISHED, TENANT, ScriptedCalls, chat_spec, task_bench, text

from router_svc.durable.limits import TaskLimits
from router_svc.durable.tasks.failpoints import Failpoints
from router_svc.durable.tasks.sweeper import OpenTaskCounts
from router_svc.durable.tasks.task_call import CallMaker
from router_svc.durable.tasks.task_records import Lane, PendingTask, TaskLease
from router_svc.durable.tasks.task_service import TaskService
from weft.api.router.v1 import task_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft_testing.fake_clock import FakeClock, let_all_run

NO_MODEL = WeftError(Reason.MODEL_NOT_FOUND, "no model is called qwen")


class SlowReads(InlineTaskStore):
    """Whose readings and counts are answered when the test says so, and are of the moment they were asked in."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.answers.set()
        self.forgets_pieces = False
        self.is_open = False
        self.takes_claims = True
        self.lanes_fault: Exception | None = None
        self.renew_fault: Exception | None = None

    async def start(self) -> None:
        self.is_open = True

    async def stop(self) -> None:
        self.is_open = False

    async def pending(self, lane: Lane, now: float, limit: int, max_bytes: int) -> Sequence[PendingTask]:
        found = await super().pending(lane, now, limit, max_bytes)
        await self.answers.wait()
        return found

    async def lanes(self, now: float, after: Lane | None, limit: int) -> Sequence[Lane]:
        if self.lanes_fault is not None:
            raise self.lanes_fault
        return await super().lanes(now, after, limit)

    async def renew(self, owner: str, lease_until: float) -> frozenset[TaskLease]:
        if self.renew_fault is not None:
            raise self.renew_fault
        return await super().renew(owner, lease_until)

    async def claim(self, task_id: str, owner: str, now: float, lease_until: float) -> TaskLease | None:
        if not self.takes_claims:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the router's database failed", retry_after_seconds=1)
        return await super().claim(task_id, owner, now, lease_until)

    async def open_counts(self) -> Mapping[str, int]:
        found = await super().open_counts()
        await self.answers.wait()
        return found

    async def chunks(
        self, task_id: str, attempt: int, after_index: int, max_bytes: int
    ) -> Sequence[task_pb2.TaskPiece]:
        if self.forgets_pieces:
            await self.delete(TENANT, task_id)
        return await super().chunks(task_id, attempt, after_index, max_bytes)


async def test_task_over_the_read_ahead_limit_is_offered_once_others_are_claimed() -> None:
    async with task_bench(limits=TaskLimits(max_peeked_bytes=25_000)) as bench:
        await bench.submit(chat_spec(words="x" * 10_000))
        first = await bench.calls.next()
        second = await bench.submit(chat_spec(words="x" * 16_000))
        await bench.settle()
        await first.grant()
        assert (await bench.calls.next()).task.id == second.id


async def test_task_that_ended_while_its_lane_was_read_is_not_offered_again() -> None:
    store = SlowReads()
    async with task_bench(store=store, limits=TaskLimits(offers_per_lane=1)) as bench:
        first = await bench.submit()
        call = await bench.calls.next()
        store.answers.clear()
        second = await bench.submit()
        await bench.settle()
        await call.grant()
        call.finish()
        await bench.until(first.id, task_pb2.TASK_STATE_COMPLETED)
        store.answers.set()
        assert (await bench.calls.next()).task.id == second.id
        await bench.settle()
        assert [each.task.id for each in bench.calls.made] == [first.id, second.id]


async def test_lanes_over_the_limit_follow_as_soon_as_others_are_done() -> None:
    async with task_bench(limits=TaskLimits(max_lanes=2, poll_interval_seconds=3600.0)) as bench:
        tasks = [await bench.submit(chat_spec(f"m{number}")) for number in range(7)]
        for _ in tasks:
            while bench.calls.unseen:
                call = await bench.calls.next()
                await call.grant()
                call.finish()
            await bench.advance(0.2)
        assert [(await bench.get(task.id)).state for task in tasks] == [task_pb2.TASK_STATE_COMPLETED] * 7


async def test_task_submitted_during_a_lane_backoff_is_offered_at_its_end_if_the_first_was_cancelled() -> None:
    async with task_bench(limits=TaskLimits(poll_interval_seconds=3600.0)) as bench:
        first = await bench.submit()
        (await bench.calls.next()).refuse(NO_MODEL)
        await bench.settle()
        await bench.service.tasks.cancel(TENANT, first.id)
        second = await bench.submit()
        await bench.advance(1.1)
        assert (await bench.calls.next()).task.id == second.id


async def test_last_output_is_not_published_before_the_end_is_on_disk() -> None:
    async with task_bench() as bench:
        task, call = await bench.begun()
        call.say(text("all"))
        call.say(FINISHED)
        await bench.advance(1)
        assert not bench.store.pieces(task.id)
        call.words.put_nowait(None)
        await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
        assert bench.store.row(task.id).last_index == 2


async def test_watcher_gets_an_error_instead_of_a_partial_answer_if_the_task_is_deleted() -> None:
    store = SlowReads()
    async with task_bench(store=store) as bench:
        task, call = await bench.begun()
        call.say(text("all"))
        call.finish()
        await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
        store.forgets_pieces = True
        with refused(Reason.NOT_FOUND):
            await bench.watch(task.id).rest()


async def test_repeated_key_returns_the_task_even_at_the_tenant_limit() -> None:
    async with task_bench(limits=TaskLimits(max_open_per_tenant=1)) as bench:
        task = await bench.submit(key="k")
        again = await bench.submit(key="k")
        assert again.id == task.id
        with refused(Reason.TOO_MANY_RESOURCES):
            await bench.submit(key="another")
        with refused(Reason.IDEMPOTENCY_CONFLICT):
            await bench.submit(chat_spec(words="something else"), key="k")


async def test_open_task_counts_stay_correct_during_and_after_a_cancelled_recount() -> None:
    store = SlowReads()
    counts = OpenTaskCounts(store, TaskLimits(max_open_per_tenant=1), FakeClock())
    counts.add(TENANT)
    store.answers.clear()
    counting = asyncio.create_task(counts.count())
    await let_all_run()
    with pytest.raises(WeftError):
        await counts.require(TENANT)
    counting.cancel()
    await asyncio.wait([counting])
    with pytest.raises(WeftError):
        await counts.require(TENANT)


async def test_unexpected_error_stops_neither_offers_nor_renewals() -> None:
    store = SlowReads()
    async with task_bench(store=store) as bench:
        running, _ = await bench.begun()
        store.lanes_fault = store.renew_fault = ValueError("a band of a newer release")
        await bench.advance(6)
        store.lanes_fault = store.renew_fault = None
        await bench.advance(1)
        later = await bench.submit()
        assert (await bench.calls.next()).task.id == later.id
        await bench.advance(20)
        assert (await bench.get(running.id)).state == task_pb2.TASK_STATE_RUNNING


async def test_database_outage_is_retried_every_second() -> None:
    store = SlowReads()
    async with task_bench(store=store, limits=TaskLimits(poll_interval_seconds=3600.0)) as bench:
        await bench.submit()
        await bench.settle()
        store.takes_claims = False
        for _ in range(20):
            while bench.calls.unseen:
                (await bench.calls.next()).granted.set()
            await bench.advance(1.1)
        assert len(bench.calls.made) == 21
        store.takes_claims = True
        await (await bench.calls.next()).grant()


async def test_failed_start_leaves_no_store_open() -> None:
    store = SlowReads()
    store.database.is_failing = True
    service = TaskService(store, TaskLimits(), ScriptedCalls(), FakeClock(), Failpoints())
    with pytest.raises(WeftError):
        await service.start()
    assert not store.is_open


def test_unreadable_task_is_malformed_rather_than_a_router_error() -> None:
    nobody: Any = None
    calls = CallMaker(placement=nobody, fleet=nobody, streams=nobody, clock=FakeClock())
    broken = PendingTask(
        id="t",
        lane=Lane("qwen", TENANT, Priority.DURABLE),
        spec=b"\xff\xff",
        caller="local",
        attempt=0,
        failures=0,
        max_attempts=1,
        created_at=0.0,
    )

    async def gate() -> None: ...

    with refused(Reason.MALFORMED_REQUEST):
        calls.make(broken, gate)
