"""The batch service: batches and files, their gRPC servicers, and the sweeper that purges them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc
import structlog
from typing_extensions import override

from router_svc.durable.batches.batch_manager import BatchManager, BatchTables
from router_svc.durable.batches.batch_servicer import BatchServicer
from router_svc.durable.batches.batch_sql import BatchTable
from router_svc.durable.batches.config import BatchLimits
from router_svc.durable.batches.file_servicer import FileServicer
from router_svc.durable.batches.files import FileManager, FileTable
from router_svc.durable.batches.item_sql import ItemTable
from router_svc.durable.tasks.config import TaskLimits
from router_svc.durable.tasks.task_events import TaskEventBus
from router_svc.store.database import RouterDatabase
from weft.api.router.v1 import (
    batch_service_pb2,
    batch_service_pb2_grpc,
    file_service_pb2,
    file_service_pb2_grpc,
)
from weft.dispatch.agents import KnownNames
from weft.durable.batches import BatchPort
from weft.durable.files import FilePort
from weft.kernel.clock import Clock, SystemClock
from weft.kernel.errors import WeftError
from weft.kernel.service import Service, start_restarting, stop_tasks

if TYPE_CHECKING:
    import asyncio


log = structlog.get_logger("weft.router")


class Sweeper:
    """Sweeps files and batches at its start and after each interval."""

    def __init__(self, files: FileManager, batches: BatchManager, limits: BatchLimits, clock: Clock) -> None:
        self._files = files
        self._batches = batches
        self._limits = limits
        self._clock = clock
        self._sweeping: asyncio.Task[None] | None = None

    async def start(self, *, all_incomplete: bool) -> None:
        """Sweeps once, then starts the loop. `all_incomplete`: see `FileManager.sweep`."""
        await self._once(all_incomplete=all_incomplete)
        self._sweeping = start_restarting(self._run, name="batch-sweeper", clock=self._clock)

    async def stop(self) -> None:
        """Stops the loop. Safe to call twice."""
        if self._sweeping is not None:
            task, self._sweeping = self._sweeping, None
            await stop_tasks([task])

    async def _run(self) -> None:
        while True:
            await self._clock.sleep(self._limits.sweep_interval_seconds)
            await self._once(all_incomplete=False)

    async def _once(self, *, all_incomplete: bool) -> None:
        """Sweeps once. A failure, such as a full disk, is logged and ends no service; the next round repeats it."""
        for manager, kind in ((self._files, "files"), (self._batches, "batches")):
            try:
                await manager.sweep(all_incomplete=all_incomplete)
            except WeftError as error:
                log.error("not swept", kind=kind, reason=error.reason.name)  # noqa: TRY400 - the cause is logged


def build(
    database: RouterDatabase,
    limits: BatchLimits,
    task_limits: TaskLimits,
    events: TaskEventBus,
    *,
    clock: Clock | None = None,
    names: KnownNames | None = None,
) -> "BatchService":
    """Returns the batch service on a database, not started. `events`: the bus of the task service in this process.

    `names`: models, routes and agents that items may name; None: any name is accepted.
    """
    chosen = clock or SystemClock()
    files = FileManager(FileTable(database), limits, chosen)
    tables = BatchTables(batches=BatchTable(database), items=ItemTable(database))
    batches = BatchManager(tables, limits, task_limits, events, chosen, names=names)
    return BatchService(database, files, batches, Sweeper(files, batches, limits, chosen))


class BatchService(Service):
    """Serves files and batches beside a router."""

    def __init__(self, database: RouterDatabase, files: FileManager, batches: BatchManager, sweeper: Sweeper) -> None:
        self._database = database
        self._files = files
        self._batches = batches
        self._sweeper = sweeper
        self._is_open = False

    @property
    def files(self) -> FilePort:
        """The file port for gateways in this process."""
        return self._files

    @property
    def batches(self) -> BatchPort:
        """The batch port for gateways in this process."""
        return self._batches

    @override
    @property
    def service_names(self) -> Sequence[str]:
        return (
            file_service_pb2.DESCRIPTOR.services_by_name["FileService"].full_name,
            batch_service_pb2.DESCRIPTOR.services_by_name["BatchService"].full_name,
        )

    @override
    def register(self, server: grpc.aio.Server) -> None:
        file_service_pb2_grpc.add_FileServiceServicer_to_server(FileServicer(self._files), server)
        batch_service_pb2_grpc.add_BatchServiceServicer_to_server(BatchServicer(self._batches), server)

    @override
    async def start(self) -> None:
        await self._database.open()
        self._is_open = True
        # No other router writes to an unshared database: what is incomplete was left by an earlier process.
        await self._sweeper.start(all_incomplete=not self._database.is_shared)

    @override
    async def stop(self, grace_seconds: float) -> None:
        if not self._is_open:
            return
        self._is_open = False
        await self._sweeper.stop()
        await self._files.stop(grace_seconds)
        await self._batches.stop(grace_seconds)
        await self._database.close()
