"""Operations over gRPC, as `gateway.runner_api.ports.OperationsPort`."""

import asyncio
from typing import Any

import grpc
import structlog

from weft.api.operations.v1 import operation_pb2, operation_service_pb2, operation_service_pb2_grpc
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call

ENDED = frozenset(
    {
        operation_pb2.Operation.STATE_SUCCEEDED,
        operation_pb2.Operation.STATE_FAILED,
        operation_pb2.Operation.STATE_CANCELLED,
    }
)

log = structlog.get_logger("weft.gateway")


class OperationsClient:
    """See `OperationsPort`."""

    def __init__(self, registry: grpc.aio.Channel, *, timeout_seconds: float) -> None:
        """`timeout_seconds` is how long one question may take; waiting for an operation has its own limit."""
        # Typed as synchronous by the generated code, whatever the channel.
        self._stub: Any = operation_service_pb2_grpc.OperationServiceStub(registry)
        self._timeout_seconds = timeout_seconds

    async def create(self, request: operation_service_pb2.CreateOperationRequest) -> operation_pb2.Operation:
        """See OperationsPort.create."""
        return await self._call(self._stub.CreateOperation, request)

    async def get(self, name: str) -> operation_pb2.Operation:
        """See OperationsPort.get."""
        return await self._call(self._stub.GetOperation, operation_service_pb2.GetOperationRequest(name=name))

    async def cancel(self, name: str, requested_by: str) -> operation_pb2.Operation:
        """See OperationsPort.cancel."""
        request = operation_service_pb2.CancelOperationRequest(name=name, requested_by=requested_by)
        return await self._call(self._stub.CancelOperation, request)

    async def wait(self, operation: operation_pb2.Operation, timeout_seconds: float) -> operation_pb2.Operation:
        """See OperationsPort.wait."""
        last = operation
        if last.state in ENDED:
            return last
        watch = self._stub.WatchOperation(operation_service_pb2.WatchOperationRequest(name=operation.name))
        try:
            async with asyncio.timeout(timeout_seconds):
                async for response in watch:
                    last = response.operation
                    if last.state in ENDED:
                        break
        except TimeoutError:
            pass
        except grpc.aio.AioRpcError as error:
            # The operation goes on without us; whoever waits can ask for it later.
            found = error_from_call(error, Reason.SERVICE_UNAVAILABLE)
            log.warning("lost sight of an operation", operation=operation.name, reason=found.reason.name.lower())
        finally:
            watch.cancel()
        return last

    async def _call(self, method: Any, request: Any) -> operation_pb2.Operation:
        try:
            response = await method(request, timeout=self._timeout_seconds)
        except grpc.aio.AioRpcError as error:
            found = error_from_call(error, Reason.SERVICE_UNAVAILABLE)
            if found.reason is Reason.SERVICE_UNAVAILABLE:
                raise WeftError(Reason.SERVICE_UNAVAILABLE, "the registry cannot be reached") from error
            raise found from error
        operation: operation_pb2.Operation = response.operation
        return operation
