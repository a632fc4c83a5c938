"""gRPC servicer of operations and the audit log."""

import re
from collections.abc import Callable
from typing import Any

import grpc
from typing_extensions import override

from registry_svc.operations.actions import check_action
from registry_svc.operations.live_operations import OPERATION_PREFIX
from registry_svc.operations.operations import Operations
from registry_svc.wire_values import page_token, read_page_token, require_count, to_actor
from weft.api.operations.v1 import operation_pb2, operation_service_pb2_grpc
from weft.api.operations.v1 import operation_service_pb2 as pb
from weft.documents.rights import require_operable
from weft.kernel.access.rpc_auth import caller
from weft.kernel.channels.rpc import AnsweringServicer
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.telemetry.structured_logs import carried_traceparent
from weft.kernel.values.names import (
    MAX_NAME_CHARS,
    MAX_REQUEST_ID_CHARS,
    MAX_TENANT_CHARS,
    is_name,
    require_request_id,
    require_token,
)

MAX_AUTHORIZATION_CHARS = 16 * 1024
DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1_000
MAX_NUMBER = 2**63 - 1

_NUMBER = re.compile(r"[1-9][0-9]{0,18}")


def valid_creation(
    request: pb.CreateOperationRequest,
) -> pb.CreateOperationRequest:
    """Returns a valid request with its actor, without checking that names exist. Raises INVALID_ARGUMENT."""
    require_request_id(request.request_id, "request_id")
    if len(request.authorization) > MAX_AUTHORIZATION_CHARS:
        raise invalid_field("authorization", f"must be at most {MAX_AUTHORIZATION_CHARS} characters")
    check_action(request.action)
    request.requested_by = to_actor(request.requested_by)
    return request


def require_operation_name(name: str) -> str:
    """Returns a valid name, "operations/<id>". Raises INVALID_ARGUMENT."""
    operation_id = name.removeprefix(OPERATION_PREFIX)
    if operation_id == name or not is_name(operation_id):
        raise invalid_field("name", f"must be {OPERATION_PREFIX}<id>, at most {MAX_NAME_CHARS} characters of id")
    return name


def to_page(request: pb.ListOperationsRequest) -> tuple[int | None, int]:
    """Returns the number before which a page begins, and its size. Raises INVALID_ARGUMENT naming the field."""
    size = page_size_of(request.page_size)
    if not request.page_token:
        return None, size
    text = read_page_token(request.page_token)
    if _NUMBER.fullmatch(text) is None or int(text) > MAX_NUMBER:
        raise invalid_field("page_token", "must be one that an earlier page returned")
    return int(text), size


def page_size_of(page_size: int) -> int:
    """Returns the effective page size. Raises INVALID_ARGUMENT."""
    return min(require_count(page_size, "page_size") or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)


Context = grpc.aio.ServicerContext[Any, Any]


def _name_models(action: operation_pb2.OperationAction, name_of: Callable[[str], str]) -> None:
    """Replaces model ids in an action by names, as governance and audit need them."""
    work: Any = getattr(action, str(action.WhichOneof("kind")))
    for field in ("model", "evict_model"):
        if field in work.DESCRIPTOR.fields_by_name:
            setattr(work, field, name_of(getattr(work, field)))


class OperationServicer(AnsweringServicer, operation_service_pb2_grpc.OperationServiceServicer):
    """See OperationService in the contract."""

    def __init__(self, operations: Operations, name_of: Callable[[str], str] = str) -> None:
        """`name_of` returns the name for a model id, and any other text unchanged."""
        self._operations = operations
        self._name_of = name_of

    @override
    async def CreateOperation(self, request: pb.CreateOperationRequest, context: Context) -> pb.CreateOperationResponse:
        wanted = valid_creation(request)
        _name_models(wanted.action, self._name_of)
        require_operable(caller(), wanted.action)
        traceparent = carried_traceparent(context.invocation_metadata())
        operation, existed = await self._operations.create(wanted, traceparent)
        return pb.CreateOperationResponse(operation=operation, existed=existed)

    @override
    async def GetOperation(self, request: pb.GetOperationRequest, context: Context) -> pb.GetOperationResponse:
        operation = await self._operations.get(require_operation_name(request.name))
        return pb.GetOperationResponse(operation=operation)

    @override
    async def ListOperations(self, request: pb.ListOperationsRequest, context: Context) -> pb.ListOperationsResponse:
        before, size = to_page(request)
        found = await self._operations.page(
            before_number=before, size=size + 1, unfinished_only=request.unfinished_only
        )
        return pb.ListOperationsResponse(
            operations=found[:size],
            next_page_token=page_token(str(found[size - 1].number)) if len(found) > size else "",
        )

    # A coroutine closes its watcher as soon as the call is cancelled, see RegistryServicer.Watch.
    @override
    async def WatchOperation(  # type: ignore[override]
        self, request: pb.WatchOperationRequest, context: Context
    ) -> None:
        followed = await self._operations.watch(require_operation_name(request.name))
        if isinstance(followed, operation_pb2.Operation):
            await context.write(pb.WatchOperationResponse(operation=followed))
            return
        with followed:
            async for operation in followed:
                await context.write(pb.WatchOperationResponse(operation=operation))

    @override
    async def WatchOperations(  # type: ignore[override]  # see WatchOperation
        self, request: pb.WatchOperationsRequest, context: Context
    ) -> None:
        past_count = page_size_of(request.past_count)
        with self._operations.watch_all() as watcher:
            for operation in await self._operations.present(past_count):
                await context.write(pb.WatchOperationsResponse(operation=operation))
            await context.write(pb.WatchOperationsResponse(synced=True))
            async for operation in watcher:
                await context.write(pb.WatchOperationsResponse(operation=operation))

    @override
    async def CancelOperation(self, request: pb.CancelOperationRequest, context: Context) -> pb.CancelOperationResponse:
        name = require_operation_name(request.name)
        cancelled = await self._operations.cancel(name, to_actor(request.requested_by))
        return pb.CancelOperationResponse(operation=cancelled)

    @override
    async def GetGovernance(self, request: pb.GetGovernanceRequest, context: Context) -> pb.GetGovernanceResponse:
        del request
        return self._operations.rules()

    @override
    async def RecordCancellation(
        self, request: pb.RecordCancellationRequest, context: Context
    ) -> pb.RecordCancellationResponse:
        request_id = require_token(request.request_id, "request_id", MAX_REQUEST_ID_CHARS)
        tenant, actor = require_token(request.tenant, "tenant", MAX_TENANT_CHARS), to_actor(request.cancelled_by)
        await self._operations.record(lambda: self._operations.audit.cancelled(request_id, tenant, actor))
        return pb.RecordCancellationResponse()

    @override
    async def ListAuditEntries(
        self, request: pb.ListAuditEntriesRequest, context: Context
    ) -> pb.ListAuditEntriesResponse:
        after = require_count(request.after_sequence, "after_sequence")
        entries, head = await self._operations.audit_page(after, page_size_of(request.page_size))
        return pb.ListAuditEntriesResponse(entries=entries, head=head)
