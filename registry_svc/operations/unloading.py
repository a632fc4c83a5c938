"""Unloads of models that are deleted: operations like any other, written into the audit log and waited for."""

import asyncio

from registry_svc.config import GovernanceMode
from registry_svc.operations.actions import checked_action
from registry_svc.operations.live_operations import OperationView
from registry_svc.operations.operations import Asked, Operations
from registry_svc.operations.policy.lifecycle import GovernedOperation, OperationState
from weft.api.operations.v1 import operation_pb2
from weft.kernel.errors import WeftError
from weft.kernel.names import new_id
from weft.kernel.reasons import Reason

MAX_UNLOAD_WAIT_SECONDS = 110.0
"""How long a forced delete waits for an unload, which lets the requests of its model end."""
_NOTHING_TO_UNLOAD = frozenset({Reason.UNSUPPORTED_OPERATION, Reason.MODEL_NOT_FOUND, Reason.WORKER_RESTARTED})
"""Answers of a runner that has nothing loaded, or that did not start the engine and so holds nothing for it."""


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
        asked = Asked(
            request_id=new_id("del"), action=checked_action(action), requested_by=requested_by, authorization=""
        )
        view, _ = await self._operations.create(asked)
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
