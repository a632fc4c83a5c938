"""What submitters may do: in the process and over a channel, on a real database."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kit.messages import news_of
from task_harness import ScriptedCalls, chat_spec, task_bench, text

from router_svc.durable.limits import TaskLimits
from router_svc.durable.tasks.failpoints import Failpoints
from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.task_service import TaskService
from router_svc.store.database import RouterDatabase
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.dispatch.agents import KnownNames
from weft.dispatch.fleet import FleetView
from weft.durable.tasks import TaskClient, state_name
from weft.kernel.access.principal import OTHER_USER
from weft.kernel.access.rpc_auth import _CALLER, RpcGuard
from weft.kernel.channels.rpc import open_channel
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import SystemClock
from weft_app.compose.grpc_host import GrpcHost

ANN, BOB = "ann", "bob"
Opened = tuple[TaskClient, ScriptedCalls]
Open = Callable[..., AbstractAsyncContextManager[Opened]]


def service_on_disk(tmp_path: Path, limits: TaskLimits, calls: ScriptedCalls) -> TaskService:
    store = SqlTaskStore(RouterDatabase(f"sqlite:///{tmp_path / 'router.db'}"))
    return TaskService(store, limits, calls, SystemClock(), Failpoints())


@asynccontextmanager
async def in_process(tmp_path: Path, limits: TaskLimits | None = None) -> AsyncIterator[Opened]:
    calls = ScriptedCalls()
    service = service_on_disk(tmp_path, limits or TaskLimits(), calls)
    await service.start()
    try:
        yield service.tasks, calls
    finally:
        await service.stop(0)


@asynccontextmanager
async def behind_a_channel(
    tmp_path: Path, limits: TaskLimits | None = None, guard: RpcGuard | None = None
) -> AsyncIterator[Opened]:
    calls = ScriptedCalls()
    host = GrpcHost(guard=guard)
    address = host.bind(f"unix:{tmp_path}/s")
    await host.start([service_on_disk(tmp_path, limits or TaskLimits(), calls)])
    channel = open_channel(address)
    try:
        yield TaskClient(channel), calls
    finally:
        await channel.close()
        await host.stop(0)


both = pytest.mark.parametrize("opening", [in_process, behind_a_channel])


async def refused(reason: Reason, awaited: Awaitable[object]) -> WeftError:
    with pytest.raises(WeftError) as found:
        await awaited
    assert found.value.reason is reason
    return found.value


def new(spec: task_pb2.TaskSpec | None = None, *, key: str = "") -> task_service_pb2.SubmitTaskRequest:
    return task_service_pb2.SubmitTaskRequest(spec=spec or chat_spec(), idempotency_key=key)


@both
async def test_task_is_acknowledged_run_watched_listed_and_deleted(opening: Open, tmp_path: Path) -> None:
    async with opening(tmp_path) as (tasks, calls):
        spec = chat_spec()
        spec.origin, spec.origin_kind = b'{"model": "qwen"}', "chat"
        submitted = await tasks.submit(ANN, new(spec))
        task = submitted.task
        assert not submitted.existed
        assert (task.state, task.tenant, task.model, task.origin_kind) == (
            task_pb2.TASK_STATE_PENDING,
            ANN,
            "qwen",
            "chat",
        )
        assert task.HasField("expire_time")
        call = await calls.next()
        await call.grant()
        call.say(text("hello"))
        call.finish()
        news = [news_of(each) async for each in tasks.watch(ANN, task.id)]
        assert isinstance(news[-1], task_pb2.Task)
        assert news[-1].state == task_pb2.TASK_STATE_COMPLETED
        said = [
            event.delta.text for each in news if isinstance(each, task_pb2.TaskPiece) for event in each.output.events
        ]
        assert "".join(said) == "hello"
        details = await tasks.details(ANN, task.id)
        assert details.spec == spec
        (attempt,) = details.attempts
        assert attempt.HasField("receipt")
        assert (attempt.attempt, attempt.receipt.host) == (1, "titan")
        page = await tasks.list_page(ANN, task_service_pb2.ListTasksRequest(states=[task_pb2.TASK_STATE_COMPLETED]))
        assert page.tasks == [details.task]
        await tasks.delete(ANN, task.id)
        await refused(Reason.NOT_FOUND, tasks.get(ANN, task.id))


class Mesh:
    """A mesh that has one model, and may lose it."""

    view = FleetView(1, {}, {})

    def have(self, *names: str) -> None:
        qwen = dict.fromkeys(names, None)
        self.view = FleetView(self.view.revision + 1, agents=qwen)  # type: ignore[arg-type]  # only names are looked at


@asynccontextmanager
async def watching_all(tasks: TaskClient, tenant: str) -> AsyncIterator[Callable[[], Awaitable[str]]]:
    """What is new of all tasks of a tenant, in words: `<id> <state>`, `<id> deleted`, `synced`."""
    async with aclosing(tasks.watch_all(tenant)) as watched:

        async def read() -> str:
            async with asyncio.timeout(20.0):
                response = await anext(watched)
            if response.HasField("task"):
                return f"{response.task.id} {state_name(response.task.state)}"
            return "synced" if response.synced else f"{response.deleted_id} deleted"

        yield read


async def until(read: Callable[[], Awaitable[str]], word: str) -> list[str]:
    """Everything up to this word; what comes between depends on which changes were merged."""
    found = [await read()]
    while found[-1] != word:
        found.append(await read())
    return found


@pytest.mark.slow("runs whole services")
@both
async def test_watch_of_all_tasks_has_each_added_changed_and_deleted_one(opening: Open, tmp_path: Path) -> None:
    async with opening(tmp_path) as (tasks, calls):
        first = (await tasks.submit(ANN, new(chat_spec()))).task.id
        call = await calls.next()
        async with watching_all(tasks, ANN) as read:
            assert [line.split()[0] for line in await until(read, "synced")] == [first, "synced"]
            foreign = (await tasks.submit(BOB, new(chat_spec()))).task.id
            await call.grant()
            call.say(text("hello"))
            call.finish()
            seen = await until(read, f"{first} COMPLETED")
            await tasks.delete(ANN, first)
            seen += await until(read, f"{first} deleted")
            second = (await tasks.submit(ANN, new(chat_spec()))).task.id
            while not (line := await read()).startswith(second):
                seen.append(line)
        assert not [line for line in seen if foreign in line]


@both
async def test_watch_of_all_tasks_counts_toward_the_watch_limit(opening: Open, tmp_path: Path) -> None:
    async with opening(tmp_path, TaskLimits(max_watches=1)) as (tasks, _), watching_all(tasks, ANN) as read:
        assert await read() == "synced"
        async with watching_all(tasks, ANN) as other:
            with pytest.raises(WeftError) as refused:
                await other()
        assert refused.value.reason is Reason.TOO_MANY_RESOURCES


async def test_misspelled_model_is_rejected_at_submission_and_a_stored_task_outlives_its_model(tmp_path: Path) -> None:
    """It was accepted, and failed after an hour."""
    mesh = Mesh()
    mesh.have("coder")
    store = SqlTaskStore(RouterDatabase(f"sqlite:///{tmp_path / 'router.db'}"))
    service = TaskService(store, TaskLimits(), ScriptedCalls(), SystemClock(), Failpoints(), names=KnownNames(mesh))
    await service.start()
    try:
        misspelt, right, waits = chat_spec(), chat_spec(), chat_spec()
        misspelt.model, right.model, waits.model = "agent/codr", "agent/coder", "agent/codr"
        waits.wait_for_model = True
        error = await refused(Reason.MODEL_NOT_FOUND, service.tasks.submit(ANN, new(misspelt)))
        assert error.metadata["field"] == "spec.model"
        assert "did you mean agent/coder?" in error.message
        assert (await service.tasks.submit(ANN, new(waits))).task.state == task_pb2.TASK_STATE_PENDING
        first = await service.tasks.submit(ANN, new(right, key="k"))
        mesh.have()
        again = await service.tasks.submit(ANN, new(right, key="k"))
        assert (again.existed, again.task.id, again.task.state) == (True, first.task.id, task_pb2.TASK_STATE_PENDING)
        await refused(Reason.MODEL_NOT_FOUND, service.tasks.submit(ANN, new(right, key="another")))
    finally:
        await service.stop(0)


@both
async def test_task_of_another_tenant_is_not_found(opening: Open, tmp_path: Path) -> None:
    async with opening(tmp_path) as (tasks, _):
        task = (await tasks.submit(ANN, new())).task
        for ask in (tasks.get, tasks.details, tasks.cancel, tasks.delete):
            missing = await refused(Reason.NOT_FOUND, ask(BOB, "task-none"))
            foreign = await refused(Reason.NOT_FOUND, ask(BOB, task.id))
            assert foreign.message.replace(task.id, "task-none") == missing.message
        await refused(Reason.NOT_FOUND, anext(tasks.watch(BOB, task.id)))
        assert (await tasks.list_page(BOB, task_service_pb2.ListTasksRequest())).tasks == []
        assert (await tasks.get(ANN, task.id)).state == task_pb2.TASK_STATE_PENDING


@both
async def test_invalid_task_error_names_the_field(opening: Open, tmp_path: Path) -> None:
    async with opening(tmp_path) as (tasks, _):
        named = await refused(Reason.INVALID_ARGUMENT, tasks.submit(ANN, new(task_pb2.TaskSpec(model="qwen"))))
        assert named.metadata["field"] == "spec.payload"
        named = await refused(Reason.INVALID_ARGUMENT, tasks.submit(ANN, new(key="k" * 256)))
        assert named.metadata["field"] == "idempotency_key"
        named = await refused(
            Reason.INVALID_ARGUMENT, tasks.list_page(ANN, task_service_pb2.ListTasksRequest(page_size=1001))
        )
        assert named.metadata["field"] == "page_size"


@both
async def test_open_task_limit_per_tenant_is_enforced(opening: Open, tmp_path: Path) -> None:
    async with opening(tmp_path, TaskLimits(max_open_per_tenant=2)) as (tasks, _):
        first = (await tasks.submit(ANN, new())).task
        await tasks.submit(ANN, new())
        refusal = await refused(Reason.TOO_MANY_RESOURCES, tasks.submit(ANN, new()))
        assert "router.tasks.max_open_per_tenant" in refusal.message
        await tasks.submit(BOB, new())
        await tasks.cancel(ANN, first.id)
    # The next life counts what is there.
    async with in_process(tmp_path, TaskLimits(max_open_per_tenant=2)) as (tasks, _):
        await tasks.submit(ANN, new())
        await refused(Reason.TOO_MANY_RESOURCES, tasks.submit(ANN, new()))


async def test_ended_tasks_free_the_open_task_limit_before_the_next_sweep() -> None:
    async with task_bench(limits=TaskLimits(max_open_per_tenant=1)) as bench:
        task, call = await bench.begun()
        await refused(Reason.TOO_MANY_RESOURCES, bench.submit())
        call.finish()
        await bench.until(task.id, task_pb2.TASK_STATE_COMPLETED)
        await bench.advance(6)
        await bench.submit()


async def test_silent_router_is_unavailable(tmp_path: Path) -> None:
    async with behind_a_channel(tmp_path) as (tasks, _):
        task = (await tasks.submit(ANN, new())).task
    channel = open_channel(f"unix:{tmp_path}/s")
    gone = TaskClient(channel, timeout_seconds=0.2)
    await refused(Reason.SERVICE_UNAVAILABLE, gone.get(ANN, task.id))
    await refused(Reason.SERVICE_UNAVAILABLE, gone.submit(ANN, new()))
    await refused(Reason.SERVICE_UNAVAILABLE, anext(gone.watch(ANN, task.id)))
    await channel.close()


async def test_negative_event_number_is_rejected(tmp_path: Path) -> None:
    async with behind_a_channel(tmp_path) as (tasks, _):
        task = (await tasks.submit(ANN, new())).task
        named = await refused(Reason.INVALID_ARGUMENT, anext(tasks.watch(ANN, task.id, -1)))
        assert named.metadata["field"] == "after_event"


class OfAnotherUser(RpcGuard):
    """Takes all calls for those of another user of the machine."""

    def check(self, method: str, context: Any) -> None:
        _CALLER.set(OTHER_USER)


@pytest.mark.parametrize(("guard", "is_kept"), [(None, True), (OfAnotherUser(), False)])
async def test_keep_alive_of_a_caller_that_may_not_unload_is_not_stored(
    tmp_path: Path, guard: RpcGuard | None, *, is_kept: bool
) -> None:
    spec = chat_spec()
    spec.options.keep_alive.seconds = 0
    async with behind_a_channel(tmp_path, guard=guard) as (tasks, _):
        task = (await tasks.submit(ANN, new(spec))).task
        assert (await tasks.details(ANN, task.id)).spec.options.HasField("keep_alive") is is_kept
