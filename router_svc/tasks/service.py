"""The running of tasks as a service beside the router's own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import grpc

from router_svc.store.database import RouterDatabase
from router_svc.tasks.answers import TaskAnswers
from router_svc.tasks.calls import CallMaker, DispatchedCalls
from router_svc.tasks.config import TaskLimits
from router_svc.tasks.engine import EngineParts, TaskEngine
from router_svc.tasks.failpoints import Failpoints, NoFailpoints
from router_svc.tasks.local import LocalParts, LocalTasks
from router_svc.tasks.open_counts import OpenCounts
from router_svc.tasks.servicer import TaskServicer
from router_svc.tasks.signals import TaskSignals
from router_svc.tasks.sql import SqlTaskStore
from router_svc.tasks.store_port import TaskStore
from router_svc.tasks.sweeper import TaskSweeper
from router_svc.tasks.wall import Wall
from router_svc.tasks.watching import TaskWatcher
from weft.api.router.v1 import task_service_pb2, task_service_pb2_grpc
from weft.dispatch.agents import KnownNames
from weft.dispatch.fleet import FleetSource, FleetView
from weft.dispatch.placement import PlacementPort
from weft.durable.tasks import TaskPort
from weft.kernel.clock import Clock, SystemClock
from weft.kernel.names import new_id
from weft.kernel.rpc import ChannelPool
from weft.kernel.service import start_restarting, stop_tasks

if TYPE_CHECKING:
    import asyncio

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
class TaskParts:
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
    parts: TaskParts,
    *,
    clock: Clock | None = None,
    failpoints: Failpoints | None = None,
    store: OpenableTaskStore | None = None,
) -> "TaskService":
    """The running of tasks that are kept in a database, not started. `store`: who keeps them instead."""
    clock = clock or SystemClock()
    calls = DispatchedCalls(placement=parts.placement, channels=parts.channels, fleet=parts.fleet, clock=clock)
    kept = store or SqlTaskStore(database, max_commit_batch=limits.max_commit_batch, clock=clock)
    service = TaskService(kept, limits, calls, clock, failpoints or NoFailpoints(), names=KnownNames(parts.fleet))
    parts.subscribe(service.engine.mesh_changed)
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
        wall = Wall(clock, store.database_now)
        self._wall = wall
        self._limits = limits
        self._signals = TaskSignals()
        self._engine = TaskEngine(
            EngineParts(
                owner=new_id(OWNER_PREFIX),
                store=store,
                signals=self._signals,
                wall=wall,
                limits=limits,
                calls=calls,
                failpoints=failpoints,
            )
        )
        self._counts = OpenCounts(store, limits, clock)
        self._sweeper = TaskSweeper(store, self._signals, self._counts, wall, limits)
        answers = TaskAnswers(store)
        self._tasks = LocalTasks(
            LocalParts(
                answers=answers,
                signals=self._signals,
                engine=self._engine,
                counts=self._counts,
                watcher=TaskWatcher(answers, store, self._signals, clock, limits),
                wall=wall,
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
        lanes = await self._store.lanes(self._wall.now(), None, self._limits.max_lanes)
        return frozenset(lane.model for lane in lanes)

    @property
    def signals(self) -> TaskSignals:
        """News of tasks, for whoever writes tasks into the same database or wants to hear of them."""
        return self._signals

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
            await self._wall.correct()
            await self._counts.count()
        except BaseException:
            await self._store.stop()
            raise
        await self._engine.start()
        self._sweeping = start_restarting(self._sweeper.run, name="task-sweeper", clock=self._wall.clock)

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
