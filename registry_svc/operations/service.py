"""Operations put together: what `registry_svc.service` starts, stops and registers."""

import grpc

from registry_svc.config import OperationSettings
from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.runner_calls import RunnerCalls
from registry_svc.operations.directory import MeshDirectory
from registry_svc.operations.governance import Gatekeeper
from registry_svc.operations.job import JobTools
from registry_svc.operations.keeper import Keeper
from registry_svc.operations.operation_sql import SqlOperationStore
from registry_svc.operations.operations import Operations
from registry_svc.operations.policy.load_times import LoadTimes
from registry_svc.operations.runner_presence import Attendance
from registry_svc.operations.servicer import OperationServicer
from registry_svc.operations.unloading import OperationUnloader
from registry_svc.store.transactions import Transactions
from weft.api.operations.v1 import operation_service_pb2_grpc


class OperationDesk:
    """The operations of one registry, on the database of its core.

    Start it after the core and stop it before: it needs the open database and the mesh.
    """

    def __init__(
        self,
        core: RegistryCore,
        transactions: Transactions,
        calls: RunnerCalls,
        gatekeeper: Gatekeeper,
        settings: OperationSettings,
    ) -> None:
        self._clock = core.clock
        directory = MeshDirectory(core)
        tools = JobTools(
            calls=calls,
            directory=directory,
            clock=core.clock,
            times=LoadTimes(),
            attendance=Attendance(directory, core.clock),
        )
        self.operations = Operations(SqlOperationStore(transactions), tools, gatekeeper, settings)
        self.unloader = OperationUnloader(self.operations)
        """Unloads models that are deleted."""
        self._keeper = Keeper(self.operations, core.clock, settings.audit_head_interval_seconds)

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer."""
        servicer = OperationServicer(self.operations, self._clock)
        operation_service_pb2_grpc.add_OperationServiceServicer_to_server(servicer, server)

    async def start(self) -> None:
        """Carry on with what an earlier life left. Raises SERVICE_UNAVAILABLE."""
        await self.operations.start()
        self._keeper.start()

    async def stop(self, grace_seconds: float) -> None:
        """Leave operations where they are. Safe to call twice, or when never started."""
        await self._keeper.stop()
        await self.operations.stop(grace_seconds)
