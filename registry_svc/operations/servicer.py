"""Governed work on the mesh, and its audit log."""

# ruff: noqa: N802 - the methods are called as in the contract

from typing import Any

import grpc

from registry_svc.checks import require_count, to_actor
from registry_svc.operations.live_operations import OperationView
from registry_svc.operations.messages import entry_message, head_message, operation_message, rules_message
from registry_svc.operations.operations import Operations
from registry_svc.operations.requests import page_size_of, page_token, to_asked, to_operation_id, to_page
from weft.api.operations.v1 import operation_pb2, operation_service_pb2, operation_service_pb2_grpc
from weft.kernel.clock import Clock
from weft.kernel.rpc import answering

Context = grpc.aio.ServicerContext[Any, Any]


class OperationServicer(operation_service_pb2_grpc.OperationServiceServicer):
    """See OperationService in the contract."""

    def __init__(self, operations: Operations, clock: Clock) -> None:
        self._operations = operations
        self._clock = clock

    async def CreateOperation(
        self, request: operation_service_pb2.CreateOperationRequest, context: Context
    ) -> operation_service_pb2.CreateOperationResponse:
        """See the contract."""
        async with answering(context):
            view, existed = await self._operations.create(to_asked(request))
            return operation_service_pb2.CreateOperationResponse(operation=self._message(view), existed=existed)

    async def GetOperation(
        self, request: operation_service_pb2.GetOperationRequest, context: Context
    ) -> operation_service_pb2.GetOperationResponse:
        """See the contract."""
        async with answering(context):
            view = await self._operations.get(to_operation_id(request.name))
            return operation_service_pb2.GetOperationResponse(operation=self._message(view))

    async def ListOperations(
        self, request: operation_service_pb2.ListOperationsRequest, context: Context
    ) -> operation_service_pb2.ListOperationsResponse:
        """See the contract."""
        async with answering(context):
            before, size = to_page(request)
            views = await self._operations.page(
                before_number=before, size=size + 1, unfinished_only=request.unfinished_only
            )
            more = len(views) > size
            return operation_service_pb2.ListOperationsResponse(
                operations=[self._message(view) for view in views[:size]],
                next_page_token=page_token(views[size - 1].operation.number) if more else "",
            )

    # A coroutine that writes ends its watcher the moment the call is cancelled, see RegistryServicer.Watch.
    async def WatchOperation(  # type: ignore[override]
        self, request: operation_service_pb2.WatchOperationRequest, context: Context
    ) -> None:
        """See the contract."""
        async with answering(context):
            followed = await self._operations.watch(to_operation_id(request.name))
            if isinstance(followed, OperationView):
                await self._write(context, followed)
                return
            with followed:
                async for view in followed:
                    await self._write(context, view)

    async def CancelOperation(
        self, request: operation_service_pb2.CancelOperationRequest, context: Context
    ) -> operation_service_pb2.CancelOperationResponse:
        """See the contract."""
        async with answering(context):
            operation_id = to_operation_id(request.name)
            view = await self._operations.cancel(operation_id, to_actor(request.requested_by))
            return operation_service_pb2.CancelOperationResponse(operation=self._message(view))

    async def GetGovernance(
        self, request: operation_service_pb2.GetGovernanceRequest, context: Context
    ) -> operation_service_pb2.GetGovernanceResponse:
        """See the contract."""
        del request
        async with answering(context):
            return rules_message(self._operations.rules())

    async def ListAuditEntries(
        self, request: operation_service_pb2.ListAuditEntriesRequest, context: Context
    ) -> operation_service_pb2.ListAuditEntriesResponse:
        """See the contract."""
        async with answering(context):
            after = require_count(request.after_sequence, "after_sequence")
            entries, head = await self._operations.audit_page(after, page_size_of(request.page_size))
            return operation_service_pb2.ListAuditEntriesResponse(
                entries=[entry_message(entry) for entry in entries], head=head_message(head)
            )

    async def _write(self, context: Context, view: OperationView) -> None:
        await context.write(operation_service_pb2.WatchOperationResponse(operation=self._message(view)))

    def _message(self, view: OperationView) -> operation_pb2.Operation:
        return operation_message(view, self._clock.monotonic())
