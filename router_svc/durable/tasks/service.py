"""The running of tasks as a service beside the router's own."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from router_svc.callers import metadata_of, tenant_of
from router_svc.durable.tasks.config import TaskLimits
from router_svc.durable.tasks.database_clock import DatabaseClock
from router_svc.durable.tasks.failpoints import Failpoints, NoFailpoints
from router_svc.durable.tasks.local_tasks import LocalTasks, LocalTasksDeps, TaskWatcher
from router_svc.durable.tasks.monotonic_reads import MonotonicTasks
from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.store_port import TaskStore
from router_svc.durable.tasks.sweeper import OpenTaskCounts, TaskSweeper
from router_svc.durable.tasks.task_call import CallMaker, DispatchedCalls
from router_svc.durable.tasks.task_engine import EngineDeps, TaskEngine
from router_svc.durable.tasks.task_events import TaskEventBus
from router_svc.store.database import RouterDatabase
from weft.api.router.v1 import task_service_pb2, task_service_pb2_grpc
from weft.api.router.v1 import task_service_pb2 as pb
from weft.dispatch.agents import KnownNames
from weft.dispatch.fleet import FleetSource, FleetView
from weft.dispatch.placement import PlacementPort
from weft.durable.task_messages import attempt_message, event_message, task_message
from weft.durable.tasks import DEFAULT_LISTED, NewTask, TaskPort, TaskQuery, TaskState
from weft.kernel.clock import Clock, SystemClock
from weft.kernel.errors import invalid_field
from weft.kernel.names import MAX_REQUEST_ID_CHARS, new_id, require_token
from weft.kernel.principal import MAY_LEAVE
from weft.kernel.rpc import ChannelPool, answering
from weft.kernel.rpc_auth import caller
from weft.kernel.service import start_restarting, stop_tasks
from weft.kernel.telemetry import TRACEPARENT, valid_traceparent

if TYPE_CHECKING:
    import asyncio


Context = grpc.aio.ServicerContext[Any, Any]


class TaskServicer(task_service_pb2_grpc.TaskServiceServicer):
    """See TaskService."""

    def __init__(self, tasks: TaskPort) -> None:
        self._tasks = tasks

    async def SubmitTask(  # noqa: N802 - the rpc's name
        self, request: pb.SubmitTaskRequest, context: Context
    ) -> pb.SubmitTaskResponse:
        """See TaskService.SubmitTask."""
        async with answering(context):
            metadata = metadata_of(context)
            spec = request.spec
            if spec.options.allow_remote:
                caller().require(MAY_LEAVE)
            # A task with a key must be the same each time that it is sent: a trace of its own would make it another.
            if not spec.traceparent and not request.idempotency_key:
                spec.traceparent = valid_traceparent(metadata.get(TRACEPARENT)) or ""
            submitted = await self._tasks.submit(
                NewTask(
                    tenant=tenant_of(metadata),
                    spec=spec,
                    idempotency_key=request.idempotency_key,
                    caller=caller().name,
                )
            )
            return pb.SubmitTaskResponse(task=task_message(submitted.task), existed=submitted.existed)
        raise AssertionError("abort has raised")

    async def GetTask(self, request: pb.GetTaskRequest, context: Context) -> pb.GetTaskResponse:  # noqa: N802
        """See TaskService.GetTask."""
        async with answering(context):
            found = await self._tasks.details(_tenant(context), _id(request.id))
            return pb.GetTaskResponse(
                task=task_message(found.task), spec=found.spec, attempts=map(attempt_message, found.attempts)
            )
        raise AssertionError("abort has raised")

    async def ListTasks(self, request: pb.ListTasksRequest, context: Context) -> pb.ListTasksResponse:  # noqa: N802
        """See TaskService.ListTasks."""
        async with answering(context):
            query = TaskQuery(
                states=frozenset(_state(number) for number in request.states),
                model=request.model,
                batch=request.batch,
                page_size=request.page_size or DEFAULT_LISTED,
                page_token=request.page_token,
            )
            page = await self._tasks.list_page(_tenant(context), query)
            return pb.ListTasksResponse(
                tasks=map(task_message, page.tasks), next_page_token=page.next_page_token, notice=page.notice
            )
        raise AssertionError("abort has raised")

    async def CancelTask(self, request: pb.CancelTaskRequest, context: Context) -> pb.CancelTaskResponse:  # noqa: N802
        """See TaskService.CancelTask."""
        async with answering(context):
            task = await self._tasks.cancel(_tenant(context), _id(request.id))
            return pb.CancelTaskResponse(task=task_message(task))
        raise AssertionError("abort has raised")

    async def WatchTask(  # noqa: N802 - the rpc's name
        self, request: pb.WatchTaskRequest, context: Context
    ) -> AsyncGenerator[pb.WatchTaskResponse]:
        """See TaskService.WatchTask."""
        async with answering(context):
            if request.after_event < 0:
                raise invalid_field("after_event", "must not be negative")
            watched = self._tasks.watch(_tenant(context), _id(request.id), request.after_event)
            async with aclosing(watched) as event:
                async for each in event:
                    yield event_message(each)

    async def DeleteTask(self, request: pb.DeleteTaskRequest, context: Context) -> pb.DeleteTaskResponse:  # noqa: N802
        """See TaskService.DeleteTask."""
        async with answering(context):
            await self._tasks.delete(_tenant(context), _id(request.id))
            return pb.DeleteTaskResponse()
        raise AssertionError("abort has raised")


def _tenant(context: Context) -> str:
    return tenant_of(metadata_of(context))


def _id(text: str) -> str:
    return require_token(text, "id", MAX_REQUEST_ID_CHARS)


def _state(number: int) -> TaskState:
    try:
        return TaskState(number)
    except ValueError:
        raise invalid_field("states", "must be states of tasks") from None


OWNER_PREFIX = "router"


class OpenableTaskStore(TaskStore, Protocol):
    """A TaskStore with a life of its own."""

    async def start(self) -> None:
        """Open it. Raises SERVICE_UNAVAILABLE."""
        ...

    async def stop(self) -> None:
        """Close it; safe to call twice."""
        ...

    async def database_now(self) -> float | None:
        """UTC as the database has it; None where no other router compares times with this one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskServiceDeps:
    """What a router gives to the running of tasks."""

    placement: PlacementPort
    fleet: FleetSource
    channels: ChannelPool
    """To the runners; whoever made it closes it, after this service has stopped."""
    subscribe: Callable[[Callable[[FleetView], None]], None]
    """Whom to ask to be told every new view of the mesh."""


def build(
    database: RouterDatabase,
    limits: TaskLimits,
    deps: TaskServiceDeps,
    *,
    clock: Clock | None = None,
    failpoints: Failpoints | None = None,
    store: OpenableTaskStore | None = None,
) -> "TaskService":
    """The running of tasks that are kept in a database, not started. `store`: who keeps them instead."""
    clock = clock or SystemClock()
    calls = DispatchedCalls(placement=deps.placement, channels=deps.channels, fleet=deps.fleet, clock=clock)
    kept = store or SqlTaskStore(database, max_commit_batch=limits.max_commit_batch, clock=clock)
    service = TaskService(kept, limits, calls, clock, failpoints or NoFailpoints(), names=KnownNames(deps.fleet))
    deps.subscribe(service.engine.mesh_changed)
    return service


class TaskService:
    """See weft.kernel.service.Service."""

    def __init__(
        self,
        store: OpenableTaskStore,
        limits: TaskLimits,
        calls: CallMaker,
        clock: Clock,
        failpoints: Failpoints,
        *,
        names: KnownNames | None = None,
    ) -> None:
        """`names`: of what tasks may ask for; None: of anything."""
        self._store = store
        database_clock = DatabaseClock(clock, store.database_now)
        self._database_clock = database_clock
        self._limits = limits
        self._events = TaskEventBus()
        self._engine = TaskEngine(
            EngineDeps(
                owner=new_id(OWNER_PREFIX),
                store=store,
                events=self._events,
                database_clock=database_clock,
                limits=limits,
                calls=calls,
                failpoints=failpoints,
            )
        )
        self._counts = OpenTaskCounts(store, limits, clock)
        self._sweeper = TaskSweeper(store, self._events, self._counts, database_clock, limits)
        answers = MonotonicTasks(store)
        self._tasks = LocalTasks(
            LocalTasksDeps(
                answers=answers,
                events=self._events,
                engine=self._engine,
                counts=self._counts,
                watcher=TaskWatcher(answers, store, self._events, clock, limits),
                database_clock=database_clock,
                limits=limits,
                failpoints=failpoints,
                names=names,
            )
        )
        self._sweeping: asyncio.Task[None] | None = None

    @property
    def tasks(self) -> TaskPort:
        """The port for whoever is in this very process."""
        return self._tasks

    async def names_waited_for(self) -> frozenset[str]:
        """The names, as they were asked for, for which tasks wait to be begun. Raises SERVICE_UNAVAILABLE."""
        lanes = await self._store.lanes(self._database_clock.now(), None, self._limits.max_lanes)
        return frozenset(lane.model for lane in lanes)

    @property
    def events(self) -> TaskEventBus:
        """News of tasks, for whoever writes tasks into the same database or wants to hear of them."""
        return self._events

    @property
    def engine(self) -> TaskEngine:
        """Who runs them."""
        return self._engine

    @property
    def service_names(self) -> Sequence[str]:
        """See Service.service_names."""
        return (task_service_pb2.DESCRIPTOR.services_by_name["TaskService"].full_name,)

    def register(self, server: grpc.aio.Server) -> None:
        """See Service.register."""
        task_service_pb2_grpc.add_TaskServiceServicer_to_server(TaskServicer(self._tasks), server)

    async def start(self) -> None:
        """See Service.start. Raises SERVICE_UNAVAILABLE."""
        await self._store.start()
        try:
            await self._database_clock.correct()
            await self._counts.count()
        except BaseException:
            await self._store.stop()
            raise
        await self._engine.start()
        self._sweeping = start_restarting(self._sweeper.run, name="task-sweeper", clock=self._database_clock.clock)

    async def stop(self, grace_seconds: float) -> None:
        """See Service.stop. What is not done within the grace is given back, for whoever comes next."""
        if self._sweeping is not None:
            task, self._sweeping = self._sweeping, None
            task.cancel()
            try:
                await self._engine.stop(grace_seconds)
                await stop_tasks([task])
            finally:
                await self._store.stop()
