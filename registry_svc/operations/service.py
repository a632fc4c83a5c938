"""Operations composed: what `registry_svc.service` starts, stops and registers."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import structlog

from registry_svc.config import GovernanceMode, OperationSettings
from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.runner_calls import RunnerCalls
from registry_svc.operations.actions import checked_action
from registry_svc.operations.governance import Gatekeeper
from registry_svc.operations.job import JobDeps
from registry_svc.operations.live_operations import OperationView
from registry_svc.operations.operation_store import SqlOperationStore
from registry_svc.operations.operations import OperationRequest, Operations
from registry_svc.operations.policy.lifecycle import GovernedOperation, OperationState
from registry_svc.operations.policy.loads import LoadTimes
from registry_svc.operations.runner_presence import MeshRunnerDirectory, RunnerPresence
from registry_svc.operations.servicer import OperationServicer
from registry_svc.store.database import Transactions
from weft.api.operations.v1 import operation_pb2, operation_service_pb2_grpc
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.names import new_id
from weft.kernel.reasons import Reason
from weft.kernel.service import start_critical, stop_tasks

MAX_UNLOAD_WAIT_SECONDS = 110.0
"""How long a forced delete waits for an unload, which lets running requests finish."""
_NOTHING_TO_UNLOAD = frozenset({Reason.UNSUPPORTED_OPERATION, Reason.MODEL_NOT_FOUND, Reason.WORKER_RESTARTED})
"""Answers of a runner that has nothing loaded, or that did not start the engine and so cannot stop it."""


class OperationUnloader:
    """See `registry_svc.mesh.declarations.Unloader`."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    async def unload(self, model: str, requested_by: str) -> None:
        """Unload a model and wait for its end. Raises OPERATION_REFUSED, DEADLINE_EXCEEDED, or why it failed."""
        if self._operations.rules().mode is not GovernanceMode.OFF:
            raise WeftError(
                Reason.OPERATION_REFUSED,
                f"{model} is loaded, and governance is on: unload it with an authorization first "
                f"(`weft unload {model} --token FILE`), then delete it",
                metadata={"model": model},
            )
        action = operation_pb2.OperationAction(unload_model=operation_pb2.UnloadModel(model=model))
        request = OperationRequest(
            request_id=new_id("del"), action=checked_action(action), requested_by=requested_by, authorization=""
        )
        view, _ = await self._operations.create(request)
        try:
            async with asyncio.timeout(MAX_UNLOAD_WAIT_SECONDS):
                operation = await self._ended(view.operation)
        except TimeoutError:
            raise WeftError(
                Reason.DEADLINE_EXCEEDED,
                f"{model} did not unload within {MAX_UNLOAD_WAIT_SECONDS:.0f} s; {view.operation.name} goes on, and "
                "nothing was deleted: delete it again when that has ended",
                metadata={"model": model, "operation": view.operation.name},
            ) from None
        if operation.state is OperationState.SUCCEEDED or operation.reason in _NOTHING_TO_UNLOAD:
            return
        reason = Reason.CANCELLED if operation.state is OperationState.CANCELLED else operation.reason
        raise WeftError(
            reason,
            f"{model} was not unloaded, and nothing was deleted: {operation.detail or 'the unload was cancelled'}",
            metadata={"model": model, "operation": operation.name},
        )

    async def _ended(self, operation: GovernedOperation) -> GovernedOperation:
        followed = await self._operations.watch(operation.id)
        if isinstance(followed, OperationView):
            return followed.operation
        with followed:
            async for view in followed:
                operation = view.operation
        return operation


log = structlog.get_logger("weft.registry.operations")

HOUSEKEEPING_INTERVAL_SECONDS = 60.0


class Housekeeper:
    """Runs housekeeping every HOUSEKEEPING_INTERVAL_SECONDS, and logs the audit head every `head_interval_seconds`."""

    def __init__(self, operations: Operations, clock: Clock, head_interval_seconds: float) -> None:
        self._operations = operations
        self._clock = clock
        self._head_interval_seconds = head_interval_seconds
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin; everything happens for the first time after one interval."""
        self._tasks = [
            start_critical(
                self._every(HOUSEKEEPING_INTERVAL_SECONDS, self._operations.housekeep), name="operations-housekeeping"
            ),
            start_critical(self._every(self._head_interval_seconds, self._tell_head), name="audit-head"),
        ]

    async def stop(self) -> None:
        """End the loops. Safe to call twice, or when never started."""
        tasks, self._tasks = self._tasks, []
        await stop_tasks(tasks)

    async def _tell_head(self) -> None:
        self._operations.audit.tell_head()

    async def _every(self, interval_seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await self._clock.sleep(interval_seconds)
            # The next round repeats what this one could not do; if the loop ended, no round would.
            try:
                await work()
            except WeftError as error:
                log.error("housekeeping failed", reason=error.reason.name)  # noqa: TRY400 - the store has logged the cause
            except Exception:
                log.exception("housekeeping failed unexpectedly")


class OperationService:
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
        directory = MeshRunnerDirectory(core)
        deps = JobDeps(
            calls=calls,
            directory=directory,
            clock=core.clock,
            times=LoadTimes(),
            presence=RunnerPresence(directory, core.clock),
        )
        self.operations = Operations(SqlOperationStore(transactions), deps, gatekeeper, settings)
        self.unloader = OperationUnloader(self.operations)
        """Unloads models that are deleted."""
        self._housekeeper = Housekeeper(self.operations, core.clock, settings.audit_head_interval_seconds)

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer."""
        servicer = OperationServicer(self.operations, self._clock)
        operation_service_pb2_grpc.add_OperationServiceServicer_to_server(servicer, server)

    async def start(self) -> None:
        """Resume the operations of the previous process. Raises SERVICE_UNAVAILABLE."""
        await self.operations.start()
        self._housekeeper.start()

    async def stop(self, grace_seconds: float) -> None:
        """Leave operations where they are. Safe to call twice, or when never started."""
        await self._housekeeper.stop()
        await self.operations.stop(grace_seconds)
