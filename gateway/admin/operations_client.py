"""Operations over gRPC, as `gateway.admin.ports.OperationsPort`."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import grpc

from gateway.admin.ports import NewOperation
from gateway.resources.registry_calls import RegistryCalls
from weft.api.operations.v1 import operation_service_pb2 as pb
from weft.api.operations.v1 import operation_service_pb2_grpc
from weft.api.registry.v1 import lease_service_pb2, lease_service_pb2_grpc
from weft.documents.operation_documents import AuditList, HostMemoryDocument, OperationDocument, OperationList
from weft.documents.operation_fields import operation_field
from weft.documents.operation_messages import audit_document, host_memory_document, operation_document
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


class OperationsClient:
    """See OperationsPort."""

    def __init__(self, registry: grpc.aio.Channel, *, timeout_seconds: float) -> None:
        # Typed as synchronous by the generated code, whatever the channel.
        self._operations: Any = operation_service_pb2_grpc.OperationServiceStub(registry)
        self._leases: Any = lease_service_pb2_grpc.LeaseServiceStub(registry)
        self._calls = RegistryCalls(operation_field, timeout_seconds=timeout_seconds)

    async def create(self, wanted: NewOperation) -> OperationDocument:
        """See OperationsPort.create."""
        request = pb.CreateOperationRequest(
            request_id=wanted.request_id,
            action=wanted.action,
            requested_by=wanted.requested_by,
            authorization=wanted.authorization,
        )
        return operation_document((await self._calls.ask(self._operations.CreateOperation, request)).operation)

    async def get(self, name: str) -> OperationDocument:
        """See OperationsPort.get."""
        found = await self._calls.ask(self._operations.GetOperation, pb.GetOperationRequest(name=name))
        return operation_document(found.operation)

    async def list_page(self, page_size: int, page_token: str, *, unfinished_only: bool) -> OperationList:
        """See OperationsPort.list_page."""
        request = pb.ListOperationsRequest(page_size=page_size, page_token=page_token, unfinished_only=unfinished_only)
        page = await self._calls.ask(self._operations.ListOperations, request)
        items = tuple(operation_document(one) for one in page.operations)
        return OperationList(kind="OperationList", items=items, next_page_token=page.next_page_token)

    async def watch(self, name: str) -> AsyncGenerator[OperationDocument]:
        """See OperationsPort.watch."""
        call = self._operations.WatchOperation(pb.WatchOperationRequest(name=name))
        last: OperationDocument | None = None
        async with aclosing(self._calls.follow(call)) as responses:
            async for response in responses:
                last = operation_document(response.operation)
                yield last
        if last is None or not last.is_over:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the registry ended the watch; the operation goes on")

    async def cancel(self, name: str, requested_by: str) -> OperationDocument:
        """See OperationsPort.cancel."""
        request = pb.CancelOperationRequest(name=name, requested_by=requested_by)
        return operation_document((await self._calls.ask(self._operations.CancelOperation, request)).operation)

    async def audit(self, after_sequence: int, page_size: int) -> AuditList:
        """See OperationsPort.audit."""
        request = pb.ListAuditEntriesRequest(page_size=page_size, after_sequence=after_sequence)
        page = await self._calls.ask(self._operations.ListAuditEntries, request)
        return AuditList(
            kind="AuditList",
            items=tuple(audit_document(entry) for entry in page.entries),
            head_sequence=page.head.sequence,
            head_hash=page.head.hash,
        )

    async def host_memory(self, host: str) -> Sequence[HostMemoryDocument]:
        """See OperationsPort.host_memory."""
        request = lease_service_pb2.ListHostMemoryRequest(host=host)
        found = await self._calls.ask(self._leases.ListHostMemory, request)
        return [host_memory_document(one) for one in found.hosts]
