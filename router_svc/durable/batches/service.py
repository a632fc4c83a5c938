"""The service of batches and of files beside a router."""

from typing_extensions import override

from router_svc.durable.batches.batch_servicer import BatchServicer
from router_svc.durable.batches.batch_sql import BatchStore
from router_svc.durable.files import FileServicer
from router_svc.durable.limits import BatchLimits, TaskLimits
from router_svc.durable.store_service import Rpcs, StoreService
from router_svc.durable.sweeper import Sweeper
from router_svc.durable.tasks.task_events import TaskEventBus
from router_svc.durable.tasks.task_media import TaskMedia
from router_svc.store.database import RouterDatabase
from weft.api.router.v1 import batch_service_pb2, batch_service_pb2_grpc, file_service_pb2, file_service_pb2_grpc
from weft.dispatch.agents import KnownNames
from weft.durable.batches import BatchClient, FileClient
from weft.kernel.clock import Clock, SystemClock


class BatchService(StoreService):
    """Serves files and batches beside a router."""

    def __init__(
        self,
        database: RouterDatabase,
        limits: BatchLimits,
        task_limits: TaskLimits,
        events: TaskEventBus,
        *,
        clock: Clock | None = None,
        names: KnownNames | None = None,
        files: FileServicer | None = None,
    ) -> None:
        """`events`: the bus of the task service in this process.

        `names`: models, routes and agents that items may name; None: any name is accepted. `files`: the files that
        tasks share; None: its own.
        """
        clock = clock or SystemClock()
        self._files = files or FileServicer(database, limits, clock)
        store, media = BatchStore(database), TaskMedia(self._files)
        self._batches = BatchServicer(store, limits, task_limits, events, clock, names=names, media=media)
        self.files, self.batches = FileClient(self._files), BatchClient(self._batches)
        """The clients of the services in this process."""
        sweeps = {"files": self._files.sweep, "batches": self._batches.sweep}
        super().__init__(
            database,
            Sweeper("batch-sweeper", sweeps, limits.sweep_interval_seconds, clock),
            Rpcs(
                file_service_pb2.DESCRIPTOR.services_by_name["FileService"].full_name,
                file_service_pb2_grpc.add_FileServiceServicer_to_server,
                self._files,
            ),
            Rpcs(
                batch_service_pb2.DESCRIPTOR.services_by_name["BatchService"].full_name,
                batch_service_pb2_grpc.add_BatchServiceServicer_to_server,
                self._batches,
            ),
        )

    @override
    async def begin(self) -> None:
        self._batches.start()

    @override
    async def end(self, grace_seconds: float) -> None:
        await self._files.stop(grace_seconds)
        await self._batches.stop(grace_seconds)
