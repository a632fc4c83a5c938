"""The task service of a router: engine, sweeps and servicer, and their life cycle."""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

import grpc
from typing_extensions import override

from router_svc.durable.limits import TaskLimits
from router_svc.durable.tasks.failpoints import Failpoints
from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.sweeper import OpenTaskCounts, TaskSweeps
from router_svc.durable.tasks.task_call import CallMaker
from router_svc.durable.tasks.task_engine import TaskEngine
from router_svc.durable.tasks.task_events import TaskEventBus
from router_svc.durable.tasks.task_media import TaskMedia
from router_svc.durable.tasks.task_recorder import TaskRecorder
from router_svc.durable.tasks.task_records import DatabaseClock, StateCount, TasksEnded
from router_svc.durable.tasks.task_run import TaskDeps
from router_svc.durable.tasks.task_servicer import TaskServicer
from router_svc.durable.tasks.task_spans import TaskSpans
from router_svc.store.database import RouterDatabase
from weft.api.router.v1 import task_service_pb2, task_service_pb2_grpc
from weft.dispatch.agents import KnownNames
from weft.durable.tasks import TaskClient, state_name
from weft.kernel.services.service_lifecycle import Service
from weft.kernel.time.clock import Clock
from weft.kernel.values.names import new_process_id
from weft.sql.sweeper import Sweeper

MAX_RESUMED = 1_000
"""Maximum tasks of each kind whose records are resumed at a start; the others are recorded when they are offered."""
UNNAMED_ROUTER = "router"
"""Owner prefix of claims by a router without a name."""


def build(
    database: RouterDatabase,
    limits: TaskLimits,
    calls: CallMaker,
    *,
    router_name: str = "",
    failpoints: Failpoints | None = None,
    store: SqlTaskStore | None = None,
) -> "TaskService":
    """Returns a task service that is not started. `store` replaces the SQL store.

    The engine must receive every new view of the mesh. `router_name`: for the owner of claims; empty: none.
    """
    kept = store or SqlTaskStore(database)
    return TaskService(
        kept,
        limits,
        calls,
        calls.clock,
        failpoints or Failpoints(),
        names=calls.names,
        spans=TaskSpans(kept, calls.tracing),
        media=calls.media,
        router_name=router_name,
    )


class TaskService(Service):
    """Runs a router's durable tasks."""

    def __init__(  # noqa: PLR0913 - what a router provides, each with a default for tests
        self,
        store: SqlTaskStore,
        limits: TaskLimits,
        calls: CallMaker,
        clock: Clock,
        failpoints: Failpoints,
        *,
        names: KnownNames | None = None,
        spans: TaskSpans | None = None,
        media: TaskMedia | None = None,
        router_name: str = "",
    ) -> None:
        """`names`: models, routes and agents that tasks may use; None: any name is accepted."""
        self._store = store
        database_clock = DatabaseClock(clock, store.database_now)
        self._database_clock = database_clock
        self._limits = limits
        self._events = TaskEventBus()
        store.report_ends = lambda ended: self._events.publish(TasksEnded(ended))
        deps = TaskDeps(
            # Per start, as claims of an earlier start must not be renewed.
            owner=new_process_id(router_name or UNNAMED_ROUTER),
            store=store,
            events=self._events,
            database_clock=database_clock,
            limits=limits,
            calls=calls,
            failpoints=failpoints,
            spans=spans or TaskSpans(store),
            media=media or TaskMedia(None),
        )
        self._engine = TaskEngine(deps)
        self._recorder: TaskRecorder | None = None
        self._keep_records_seconds = 0.0
        self._counts = OpenTaskCounts(store, limits, clock)
        self._sweeps = TaskSweeps(deps, self._counts, lambda: self._engine.refusals)
        sweeps = {"tasks": self._sweeps.sweep}
        self._sweeper = Sweeper("task-sweeper", sweeps, limits.sweep_interval_seconds, clock)
        self.servicer = TaskServicer(deps, self._engine, self._counts, names)
        self.tasks = TaskClient(self.servicer)
        """Client of the service in this process."""

    @property
    def released(self) -> Mapping[str, int]:
        """Number of finished tasks released early since the start, by bound."""
        return {bound.value: count for bound, count in self._sweeps.released.items()}

    @property
    def states(self) -> Mapping[str, StateCount]:
        """Tasks by state, as of the last sweep."""
        return {state_name(state).lower(): count for state, count in self._sweeps.states.items()}

    def record_with(self, recorder: TaskRecorder, keep_seconds: float) -> None:
        """Record tasks as requests, whose records are kept for `keep_seconds`. Call it before the start."""
        self._recorder, self._keep_records_seconds = recorder, keep_seconds
        self._events.subscribe(recorder)

    def utc_now(self) -> float:
        """The clock of stored tasks: UTC seconds since the epoch."""
        return self._database_clock.now()

    async def names_waited_for(self) -> frozenset[str]:
        """Returns the requested model names of pending tasks. Raises SERVICE_UNAVAILABLE."""
        lanes = await self._store.lanes(self._database_clock.now(), None, self._limits.max_lanes)
        return frozenset(lane.model for lane in lanes)

    @property
    def events(self) -> TaskEventBus:
        """The event bus of tasks, for batches and other writers of tasks in the same database."""
        return self._events

    @property
    def engine(self) -> TaskEngine:
        """The engine that runs the tasks."""
        return self._engine

    @override
    @property
    def service_names(self) -> Sequence[str]:
        return (task_service_pb2.DESCRIPTOR.services_by_name["TaskService"].full_name,)

    @override
    def register(self, server: grpc.aio.Server) -> None:
        task_service_pb2_grpc.add_TaskServiceServicer_to_server(self.servicer, server)

    async def start(self) -> None:
        """Starts the store, the engine and the sweeper. Raises SERVICE_UNAVAILABLE."""
        await self._store.start()
        try:
            await self._database_clock.synchronize()
            await self._counts.count()
            await self._resume_records()
        except BaseException:
            await self._store.stop()
            raise
        await self._engine.start()
        self._sweeper.start(immediately=True)

    async def _resume_records(self) -> None:
        """Records what an earlier process began: tasks with attempts, and ends that it could not write any more."""
        if self._recorder is None:
            return
        for each in await self._store.tried(MAX_RESUMED):
            self._recorder.resume(each)
        # Records of earlier ends are deleted, not missing.
        since = self.utc_now() - self._keep_records_seconds
        if ended := await self._store.unrecorded_ends(since, MAX_RESUMED):
            self._recorder(TasksEnded(ended))

    async def stop(self, grace_seconds: float) -> None:
        """Stops everything; runs that do not end within the grace period are reverted for other routers."""
        if not self._sweeper.is_started:
            return
        async with AsyncExitStack() as last_first:
            last_first.push_async_callback(self._store.stop)
            last_first.push_async_callback(self._engine.stop, grace_seconds)
            last_first.push_async_callback(self._sweeper.stop)
