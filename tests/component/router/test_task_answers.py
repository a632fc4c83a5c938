"""Answers about a task that cross: what was read before a change is not shown after the change was."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TypeVar

import pytest
from inline_task_store import InlineTaskStore
from kit.refusals import refused
from task_harness import NOTICE_SECONDS, TENANT, TaskBench, chat_spec, task_bench

from router_svc.durable.tasks.task_records import NewTask
from router_svc.durable.tasks.task_servicer import MAX_REMEMBERED, MonotonicReads
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.durable.tasks import is_terminal
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.timestamps import stamp_of
from weft.kernel.values.names import new_id

Read = TypeVar("Read")
KEY = "once"
NOW = datetime(2026, 11, 21, tzinfo=UTC)


class SteppedTaskStore(InlineTaskStore):
    """What it reads for one caller arrives when the test says so: the snapshot is older than the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.holds_next = False
        self.has_read = asyncio.Event()
        self.go_on = asyncio.Event()

    async def _late(self, read: Awaitable[Read]) -> Read:
        holds, self.holds_next = self.holds_next, False
        found = await read
        if holds:
            self.has_read.set()
            await self.go_on.wait()
        return found

    async def get(self, tenant: str, task_id: str) -> task_pb2.Task | None:
        return await self._late(super().get(tenant, task_id))

    async def details(self, tenant: str, task_id: str) -> task_service_pb2.GetTaskResponse | None:
        return await self._late(super().details(tenant, task_id))

    async def list_page(
        self, tenant: str, query: task_service_pb2.ListTasksRequest
    ) -> task_service_pb2.ListTasksResponse:
        return await self._late(super().list_page(tenant, query))

    async def submit(self, row: NewTask) -> task_service_pb2.SubmitTaskResponse:
        return await self._late(super().submit(row))


async def _get(bench: TaskBench, task: task_pb2.Task) -> task_pb2.Task | None:
    return await bench.service.tasks.get(TENANT, task.id)


async def _details(bench: TaskBench, task: task_pb2.Task) -> task_pb2.Task | None:
    found = await bench.service.tasks.details(TENANT, task.id)
    assert not is_terminal(found.task) or all(attempt.HasField("end_time") for attempt in found.attempts)
    return found.task


async def _listed(bench: TaskBench, task: task_pb2.Task) -> task_pb2.Task | None:
    del task
    page = await bench.service.tasks.list_page(TENANT, task_service_pb2.ListTasksRequest())
    return page.tasks[0] if page.tasks else None


async def _listed_as_open(bench: TaskBench, task: task_pb2.Task) -> task_pb2.Task | None:
    del task
    query = task_service_pb2.ListTasksRequest(
        states=frozenset({task_pb2.TASK_STATE_PENDING, task_pb2.TASK_STATE_RUNNING})
    )
    page = await bench.service.tasks.list_page(TENANT, query)
    return page.tasks[0] if page.tasks else None


async def _watched(bench: TaskBench, task: task_pb2.Task) -> task_pb2.Task | None:
    watch = bench.watch(task.id)
    try:
        news = await watch.next()
    finally:
        await watch.close()
    assert isinstance(news, task_pb2.Task)
    return news


async def _sent_again(bench: TaskBench, task: task_pb2.Task) -> task_pb2.Task | None:
    del task
    submitted = await bench.service.tasks.submit(
        TENANT, task_service_pb2.SubmitTaskRequest(spec=chat_spec(), idempotency_key=KEY)
    )
    return submitted.task


Reading = Callable[[TaskBench, task_pb2.Task], Awaitable[task_pb2.Task | None]]
READINGS: list[Reading] = [_get, _details, _listed, _listed_as_open, _watched, _sent_again]
readings = pytest.mark.parametrize("reading", READINGS)


async def _overtaken(
    bench: TaskBench, reading: Awaitable[task_pb2.Task | None], change: Callable[[], Awaitable[object]]
) -> task_pb2.Task | None:
    """What is answered to a reading whose snapshot is older than a change that was answered before it."""
    store = bench.store
    assert isinstance(store, SteppedTaskStore)
    store.holds_next = True
    answer = asyncio.ensure_future(reading)
    async with asyncio.timeout(NOTICE_SECONDS):
        await store.has_read.wait()
        await change()
        store.go_on.set()
        return await answer


@readings
async def test_stale_read_does_not_show_a_cancelled_task_as_waiting(reading: Reading) -> None:
    async with task_bench(store=SteppedTaskStore()) as bench:
        task = await bench.submit(key=KEY)
        told = await _overtaken(bench, reading(bench, task), lambda: bench.service.tasks.cancel(TENANT, task.id))
        assert told is None or told.state == task_pb2.TASK_STATE_CANCELLED
        assert (told is None) is (reading is _listed_as_open)
        assert told is None or not told.owner


@readings
async def test_stale_read_does_not_show_an_ended_task_as_running(reading: Reading) -> None:
    async with task_bench(store=SteppedTaskStore()) as bench:
        task = await bench.submit(key=KEY)
        call = await bench.calls.next()
        await call.grant()

        async def end() -> None:
            call.finish()
            await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)

        told = await _overtaken(bench, reading(bench, task), end)
        assert told is None or told.state == task_pb2.TASK_STATE_COMPLETED
        assert (told is None) is (reading is _listed_as_open)


async def test_earlier_attempt_is_not_returned_after_a_later_one() -> None:
    async with task_bench(store=SteppedTaskStore()) as bench:
        task, call = await bench.begun()

        async def try_again() -> None:
            call.fail(WeftError(Reason.WORKER_LOST, "it died"))
            await bench.until(task.id, task_pb2.TASK_STATE_PENDING)
            await bench.advance(60.0)
            await (await bench.calls.next()).grant()
            assert (await bench.get(task.id)).attempt == 2

        told = await _overtaken(bench, _get(bench, task), try_again)
        assert told is not None
        assert (told.state, told.attempt) == (task_pb2.TASK_STATE_RUNNING, 2)


async def test_deleted_task_is_not_listed_by_a_stale_read() -> None:
    async with task_bench(store=SteppedTaskStore()) as bench:
        task = await bench.submit()
        await bench.service.tasks.cancel(TENANT, task.id)
        deletion = bench.service.tasks.delete(TENANT, task.id)
        assert await _overtaken(bench, _listed(bench, task), lambda: deletion) is None


@pytest.mark.parametrize(
    ("reading", "reason"),
    [
        (_get, Reason.NOT_FOUND),
        (_details, Reason.NOT_FOUND),
        (_watched, Reason.NOT_FOUND),
        (_sent_again, Reason.SERVICE_UNAVAILABLE),
    ],
)
async def test_deleted_task_is_not_returned_by_a_stale_read(reading: Reading, reason: Reason) -> None:
    async with task_bench(store=SteppedTaskStore()) as bench:
        task = await bench.submit(key=KEY)
        await bench.service.tasks.cancel(TENANT, task.id)
        deletion = bench.service.tasks.delete(TENANT, task.id)
        with refused(reason):
            await _overtaken(bench, reading(bench, task), lambda: deletion)


async def test_response_to_another_tenant_does_not_affect_the_owner() -> None:
    async with task_bench(store=SteppedTaskStore()) as bench:
        task = await bench.submit()

        async def ask_for_anothers() -> None:
            with pytest.raises(WeftError):
                await bench.service.tasks.get("bob", task.id)

        told = await _overtaken(bench, _get(bench, task), ask_for_anothers)
        assert told is not None
        assert told.state == task_pb2.TASK_STATE_PENDING


def _task(state: "task_pb2.TaskState.ValueType", attempt: int = 0, *, task_id: str = "task-1") -> task_pb2.Task:
    return task_pb2.Task(
        id=task_id, tenant=TENANT, state=state, model="qwen", create_time=stamp_of(NOW), attempt=attempt, max_attempts=5
    )


def test_monotonic_read_state_is_cleared_after_the_last_read() -> None:
    shown = MonotonicReads()
    with shown.reading():
        shown.show(_task(task_pb2.TASK_STATE_CANCELLED))
    with shown.reading():
        assert shown.show(_task(task_pb2.TASK_STATE_PENDING)) == _task(task_pb2.TASK_STATE_PENDING)


def test_monotonic_read_state_of_a_long_read_is_bounded() -> None:
    shown = MonotonicReads()
    with shown.reading():
        for _ in range(MAX_REMEMBERED + 1):
            with shown.reading():
                shown.show(_task(task_pb2.TASK_STATE_CANCELLED, task_id=new_id("task")))
        assert len(shown._shown) == MAX_REMEMBERED
    assert not shown._shown
