"""Operations over gRPC, as `gateway.runner_api.ports.OperationsPort`."""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

import grpc
from typing_extensions import override

from gateway.resources.registry_client import RegistryCalls
from gateway.runner_api.ports import OperationsPort
from weft.api.operations.v1 import operation_pb2, operation_service_pb2, operation_service_pb2_grpc
from weft.documents.field_names import operation_field
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger

ENDED = frozenset(
    {
        operation_pb2.Operation.STATE_SUCCEEDED,
        operation_pb2.Operation.STATE_FAILED,
        operation_pb2.Operation.STATE_CANCELLED,
    }
)

_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "name": "modelId",
        "model": "modelId",
        "tenant": "tenantId",
        "memoryBudgetMb": "gpuMemoryBudgetMB",
        "authorization": "verifiedOpToken",
    }
)

log = get_logger("weft.gateway")


class OperationsClient(OperationsPort):
    """See `OperationsPort`."""

    def __init__(self, registry: grpc.aio.Channel, *, timeout_seconds: float) -> None:
        """`timeout_seconds` bounds each call; waiting for an operation has its own limit."""
        # Typed as synchronous by the generated code, whatever the channel.
        self._stub: Any = operation_service_pb2_grpc.OperationServiceStub(registry)
        self._calls = RegistryCalls(callers_field, timeout_seconds=timeout_seconds)

    @override
    async def create(self, request: operation_service_pb2.CreateOperationRequest) -> operation_pb2.Operation:
        return await self._operation(self._stub.CreateOperation, request)

    @override
    async def get(self, name: str) -> operation_pb2.Operation:
        return await self._operation(self._stub.GetOperation, operation_service_pb2.GetOperationRequest(name=name))

    @override
    async def cancel(self, name: str, requested_by: str) -> operation_pb2.Operation:
        request = operation_service_pb2.CancelOperationRequest(name=name, requested_by=requested_by)
        return await self._operation(self._stub.CancelOperation, request)

    @override
    async def wait(self, operation: operation_pb2.Operation, timeout_seconds: float) -> operation_pb2.Operation:
        last = operation
        if last.state in ENDED:
            return last
        watch = self._stub.WatchOperation(operation_service_pb2.WatchOperationRequest(name=operation.name))
        try:
            async with asyncio.timeout(timeout_seconds), aclosing(self._calls.follow(watch)) as responses:
                async for response in responses:
                    last = response.operation
                    if last.state in ENDED:
                        break
        except TimeoutError:
            pass
        except WeftError as error:
            # The operation continues; the caller can get it later.
            log.warning("lost sight of an operation", operation=operation.name, reason=error.reason.name.lower())
        return last

    async def _operation(self, method: Any, request: Any) -> operation_pb2.Operation:
        operation: operation_pb2.Operation = (await self._calls.call(method, request)).operation
        return operation


def callers_field(field: str) -> str:
    """Returns the name of a registry field in the bodies of this API."""
    name = operation_field(field)
    return _FIELDS.get(name, name)
