"""Operations of the registry: their gRPC client, and code shared by the HTTP APIs that create operations.

These are `gateway.admin` (a mesh), `gateway.runner_api` (one runner) and extensions, with their own paths and bodies.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from types import MappingProxyType
from typing import Any

import grpc
from starlette.requests import Request

from gateway.auth.authentication import HOME_SOCKET
from gateway.gateway_config import GatewayConfig
from gateway.intake.body import read_json_body
from gateway.intake.headers import stated_traceparent
from gateway.intake.json_guard import Model, parse
from gateway.intake.query import begin_change
from gateway.registry_client import RegistryCalls
from gateway.request_facts import facts_of, headers_of
from weft.api.operations.v1 import operation_pb2, operation_service_pb2_grpc
from weft.api.operations.v1 import operation_service_pb2 as pb
from weft.api.registry.v1 import lease_pb2, lease_service_pb2, lease_service_pb2_grpc
from weft.documents.field_names import operation_field
from weft.documents.rights import require_operable
from weft.kernel.access.principal import LOCAL
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft.kernel.telemetry.structured_logs import TRACEPARENT
from weft.kernel.values.names import DEFAULT_TENANT, MAX_TENANT_CHARS, is_token, new_id

OPERATION_PREFIX = "operations/"
MAX_AUTHORIZATION_CHARS = 16 * 1024
ENDED = frozenset(
    {
        operation_pb2.Operation.STATE_SUCCEEDED,
        operation_pb2.Operation.STATE_FAILED,
        operation_pb2.Operation.STATE_CANCELLED,
    }
)
_IDEMPOTENCY_KEY = b"idempotency-key"
_REASONS = frozenset(reason.value for reason in Reason)

log = get_logger("weft.gateway")


_PATH_FIELDS = MappingProxyType({"action.remove_model.model": "name", "lease_id": "id"})
"""Path parameters by the fields of messages."""


def _callers_field(field: str) -> str:
    return _PATH_FIELDS.get(field) or operation_field(field)


class OperationsClient:
    """Creates and follows operations of the registry.

    Every method raises the registry's WeftError, SERVICE_UNAVAILABLE if the registry cannot be reached, and
    DEADLINE_EXCEEDED if it does not answer in time.
    """

    def __init__(
        self,
        registry: grpc.aio.Channel,
        *,
        timeout_seconds: float,
        callers_field: Callable[[str], str] = _callers_field,
    ) -> None:
        """`callers_field` names a field of a message as bodies do; `timeout_seconds` bounds each call but a watch."""
        # The generated code types stubs as synchronous.
        self._operations: Any = operation_service_pb2_grpc.OperationServiceStub(registry)
        self._leases: Any = lease_service_pb2_grpc.LeaseServiceStub(registry)
        self._calls = RegistryCalls(callers_field, timeout_seconds=timeout_seconds)

    async def create(self, request: pb.CreateOperationRequest, traceparent: str = "") -> operation_pb2.Operation:
        """Creates an operation below the span of `traceparent`; returns the existing one of the same request id."""
        method = self._operations.CreateOperation
        if traceparent:
            method = partial(method, metadata=((TRACEPARENT, traceparent),))
        return await self._operation(method, request)

    async def get(self, name: str) -> operation_pb2.Operation:
        """Returns one operation. Raises NOT_FOUND."""
        return await self._operation(self._operations.GetOperation, pb.GetOperationRequest(name=name))

    async def list_page(self, request: pb.ListOperationsRequest) -> pb.ListOperationsResponse:
        """Returns a page of operations, newest first."""
        page: pb.ListOperationsResponse = await self._calls.call(self._operations.ListOperations, request)
        return page

    async def watch(self, name: str) -> AsyncGenerator[operation_pb2.Operation]:
        """Yields the operation, then its state after every change until it has ended."""
        call = self._operations.WatchOperation(pb.WatchOperationRequest(name=name))
        last = operation_pb2.Operation()
        async with aclosing(self._calls.follow(call)) as responses:
            async for response in responses:
                last = response.operation
                yield last
        if last.state not in ENDED:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the registry ended the watch; the operation continues")

    def watch_all(self, past_count: int) -> AsyncGenerator[pb.WatchOperationsResponse]:
        """Yields operations, of which at most `past_count` have ended, then `synced`, then every change."""
        return self._calls.follow(self._operations.WatchOperations(pb.WatchOperationsRequest(past_count=past_count)))

    def watch_memory(self) -> AsyncGenerator[lease_service_pb2.WatchHostMemoryResponse]:
        """Yields the VRAM ledger of each host, `synced`, then every change."""
        return self._calls.follow(self._leases.WatchHostMemory(lease_service_pb2.WatchHostMemoryRequest()))

    async def cancel(self, name: str, requested_by: str) -> operation_pb2.Operation:
        """Requests cancellation; returns the operation afterwards."""
        request = pb.CancelOperationRequest(name=name, requested_by=requested_by)
        return await self._operation(self._operations.CancelOperation, request)

    async def audit(self, request: pb.ListAuditEntriesRequest) -> pb.ListAuditEntriesResponse:
        """Returns a part of the audit log, and its newest hash."""
        page: pb.ListAuditEntriesResponse = await self._calls.call(self._operations.ListAuditEntries, request)
        return page

    async def host_memory(self, host: str) -> Sequence[lease_service_pb2.HostMemory]:
        """Returns the VRAM ledger of one host, or of all for an empty name."""
        request = lease_service_pb2.ListHostMemoryRequest(host=host)
        found: Sequence[lease_service_pb2.HostMemory] = (
            await self._calls.call(self._leases.ListHostMemory, request)
        ).hosts
        return found

    async def release_lease(self, lease_id: str, requested_by: str) -> lease_pb2.Lease:
        """Releases the lease of a program; returns it afterwards. Raises NOT_FOUND and RESOURCE_IN_USE."""
        request = lease_service_pb2.ReleaseProgramLeaseRequest(lease_id=lease_id, requested_by=requested_by)
        released: lease_pb2.Lease = (await self._calls.call(self._leases.ReleaseProgramLease, request)).lease
        return released

    async def _operation(self, method: Any, request: Any) -> operation_pb2.Operation:
        operation: operation_pb2.Operation = (await self._calls.call(method, request)).operation
        return operation


async def create_operation(
    request: Request,
    operations: OperationsClient,
    action: operation_pb2.OperationAction,
    *,
    keyless: str,
    request_id: str = "",
    authorization: str = "",
    configured_source: bool = False,
) -> operation_pb2.Operation:
    """Creates an operation for the caller of a request; `keyless` as `requester`, `request_id` empty: a new one.

    `configured_source`: its source is weft's or the operator's, not the caller's. Raises PERMISSION_DENIED as
    `require_operable`, and the registry's refusal.
    """
    facts = facts_of(request.scope)
    require_operable(facts.principal, action, configured_source=configured_source)
    wanted = pb.CreateOperationRequest(
        request_id=request_id or new_id("op"),
        action=action,
        requested_by=requester(request, keyless),
        authorization=authorization,
    )
    operation = await operations.create(wanted, stated_traceparent(request.scope))
    log.info("operation requested", request_id=facts.request_id, operation=operation.name)
    return operation


def reason_of(operation: operation_pb2.Operation) -> Reason:
    """Returns the reason of an operation that did not succeed."""
    number = int(operation.reason)
    if operation.state == operation_pb2.Operation.STATE_CANCELLED:
        return Reason.CANCELLED
    return Reason(number) if number in _REASONS else Reason.INTERNAL


async def ended_operation(
    operations: OperationsClient,
    operation: operation_pb2.Operation,
    timeout_seconds: float,
    *,
    needs_registry: bool = False,
) -> operation_pb2.Operation:
    """Waits for the end of an operation; returns its last known state at the timeout or if the registry is lost.

    `needs_registry`: raise the error of a lost registry instead.
    """
    last = operation
    if last.state in ENDED:
        return last
    try:
        async with asyncio.timeout(timeout_seconds), aclosing(operations.watch(operation.name)) as states:
            async for last in states:
                if last.state in ENDED:
                    break
    except TimeoutError:
        pass
    except WeftError as error:
        if needs_registry:
            raise
        # The operation continues; the caller can get it later.
        log.warning("watch of an operation was lost", operation=operation.name, reason=error.reason.name.lower())
    return last


async def read_body(
    request: Request, config: GatewayConfig, model: type[Model], surface: str, *, optional: bool = False
) -> Model:
    """Returns the body of a change as `model`; `optional`: an empty body counts as `{}`.

    Raises as `parse`, and PERMISSION_DENIED for a foreign page.
    """
    begin_change(request, surface)
    headers = headers_of(request.scope)
    is_empty = headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers
    raw = b"{}" if optional and is_empty else await read_json_body(request.scope, request.receive, config)
    return parse(model, raw, max_depth=config.limits.max_json_depth)


def idempotency_key(request: Request) -> str | None:
    """Returns the header Idempotency-Key, unchecked; None: absent."""
    given = headers_of(request.scope).get(_IDEMPOTENCY_KEY)
    return None if given is None else given.decode("latin-1")


def requester(request: Request, keyless: str) -> str:
    """Returns the caller's name for the audit log: that of its key, or `keyless` if callers need none."""
    principal = facts_of(request.scope).principal
    return keyless if principal is LOCAL else principal.name


def keyless_name(request: Request) -> str:
    """Returns the audit log name of a caller without a key: the user of the home's socket.

    Over a port it is the self-reported tenant.
    """
    if request.scope.get(HOME_SOCKET):
        return LOCAL.name
    tenant = headers_of(request.scope).get(b"x-tenant-id", b"").decode("latin-1")
    return f"http:{tenant if is_token(tenant, MAX_TENANT_CHARS) else DEFAULT_TENANT}"
