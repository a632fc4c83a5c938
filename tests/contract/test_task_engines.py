"""Several routers on one PostgreSQL: what a dead one had begun is done by the next."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta

import pytest
from kit.messages import news_of

from router_svc.durable.limits import TaskLimits
from router_svc.durable.tasks.failpoints import Failpoints
from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.task_call import CallMaker, Gate, TaskCall
from router_svc.durable.tasks.task_records import PendingTask
from router_svc.durable.tasks.task_service import TaskService
from router_svc.store.database import RouterDatabase
from weft.api.common.v1 import chat_pb2, event_pb2, receipt_pb2
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.kernel.time.clock import SystemClock

pytest_plugins = ("database_fixtures",)

NOTICE_SECONDS = 30.0
TENANT = "ann"
FINISHED = event_pb2.InferenceEvent(finished=event_pb2.Finished())
FAST = TaskLimits(lease_seconds=1.5, poll_interval_seconds=0.5, retry_delay_seconds=0.05, watch_poll_seconds=20.0)
"""For the test in which a lease ends: its router must not be kept from the processor for as long as that."""
LASTING = dataclasses.replace(FAST, lease_seconds=NOTICE_SECONDS)


class Call(TaskCall):
    """Runs a task at once, and ends it when it may."""

    receipt: receipt_pb2.Receipt | None = None

    def __init__(self, calls: "Calls", task: PendingTask, gate: Gate) -> None:
        self._calls = calls
        self._task = task
        self._gate = gate

    def set_unary(self, unary: bool) -> None: ...

    async def outputs(self) -> AsyncGenerator[task_pb2.TaskOutput]:
        await self._gate()
        self._calls.begun[self._task.id] += 1
        self._calls.has_begun.set()
        try:
            await self._calls.may_end.wait()
        finally:
            self._calls.left.append(self._task.id)
            self._calls.has_left.set()
        yield task_pb2.TaskOutput(events=[FINISHED])


class Calls(CallMaker):
    """Those of one router; every task has a slot."""

    def __init__(self, *, may_end: bool) -> None:
        self.begun: Counter[str] = Counter()
        self.left: list[str] = []
        self.has_begun, self.has_left, self.may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        if may_end:
            self.may_end.set()

    def make(self, task: PendingTask, gate: Gate) -> Call:
        return Call(self, task, gate)


@asynccontextmanager
async def router(url: str, calls: CallMaker, limits: TaskLimits = LASTING) -> AsyncIterator[TaskService]:
    store = SqlTaskStore(RouterDatabase(url))
    service = TaskService(store, limits, calls, SystemClock(), Failpoints())
    await service.start()
    try:
        yield service
    finally:
        await service.stop(0)


def a_task(key: str = "") -> task_service_pb2.SubmitTaskRequest:
    spec = task_pb2.TaskSpec(model="qwen")
    spec.chat.messages.add(role=chat_pb2.ROLE_USER).content.add(text="hello")
    return task_service_pb2.SubmitTaskRequest(spec=spec, idempotency_key=key)


async def end_of(service: TaskService, task_id: str) -> task_pb2.Task:
    async with asyncio.timeout(NOTICE_SECONDS):
        *_, end = [news_of(news) async for news in service.tasks.watch(TENANT, task_id)]
    assert isinstance(end, task_pb2.Task)
    return end


async def noticed(event: asyncio.Event) -> None:
    async with asyncio.timeout(NOTICE_SECONDS):
        await event.wait()


async def test_work_of_a_dead_router_is_taken_over_and_its_late_result_is_ignored(postgres_url: str) -> None:
    busy, spare = Calls(may_end=False), Calls(may_end=True)
    async with router(postgres_url, busy, FAST) as dying:
        task = (await dying.tasks.submit(TENANT, a_task())).task
        await noticed(busy.has_begun)
        # Its heart stops, as that of a laptop that sleeps.
        heart, *others = dying.engine._loops
        for loop in (heart, *others):
            loop.cancel()
        async with router(postgres_url, spare, FAST) as other:
            end = await end_of(other, task.id)
            assert (end.state, end.attempt) == (task_pb2.TASK_STATE_COMPLETED, 2)
            busy.may_end.set()
            await noticed(busy.has_left)
            await dying.stop(5)
            assert await other.tasks.get(TENANT, task.id) == end


@pytest.mark.parametrize("skew_seconds", [-3600.0, 3600.0])
async def test_router_with_a_wrong_clock_takes_no_tasks_from_others(postgres_url: str, skew_seconds: float) -> None:
    busy = Calls(may_end=False)

    class WrongClock(SystemClock):
        def utc_now(self) -> datetime:
            return super().utc_now() + timedelta(seconds=skew_seconds)

    async with router(postgres_url, busy) as works:
        task = (await works.tasks.submit(TENANT, a_task())).task
        await noticed(busy.has_begun)
        store = SqlTaskStore(RouterDatabase(postgres_url))
        wrong = TaskService(store, LASTING, Calls(may_end=True), WrongClock(), Failpoints())
        await wrong.start()
        await wrong.engine._lease_renewer.renew()
        assert (await works.tasks.get(TENANT, task.id)).attempt == 1
        assert (await works.tasks.get(TENANT, task.id)).state == task_pb2.TASK_STATE_RUNNING
        mine = (await wrong.tasks.submit(TENANT, a_task())).task
        busy.may_end.set()
        assert (await end_of(works, mine.id)).state == task_pb2.TASK_STATE_COMPLETED
        await wrong.stop(0)
