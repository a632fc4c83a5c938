"""A `ResponseStore` over gRPC."""

from collections.abc import Sequence
from datetime import UTC
from typing import TYPE_CHECKING, cast

import grpc

from weft.api.router.v1 import stored_response_service_pb2 as pb
from weft.api.router.v1 import stored_response_service_pb2_grpc
from weft.durable.responses import StoredResponse
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call

if TYPE_CHECKING:
    from weft.api.router.v1.stored_response_service_pb2_grpc import StoredResponseServiceAsyncStub

TIMEOUT_SECONDS = 10.0


class RemoteResponses:
    """See ResponseStore."""

    def __init__(self, channel: grpc.aio.Channel, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._timeout_seconds = timeout_seconds
        stub = stored_response_service_pb2_grpc.StoredResponseServiceStub(channel)
        self._stub = cast("StoredResponseServiceAsyncStub", stub)

    async def save(self, response: StoredResponse) -> None:
        """See ResponseStore.save."""
        try:
            await self._stub.SaveResponse(
                pb.SaveResponseRequest(response=response_message(response)), timeout=self._timeout_seconds
            )
        except grpc.aio.AioRpcError as error:
            raise _told(error) from error

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """See ResponseStore.get."""
        try:
            found = await self._stub.GetResponse(
                pb.GetResponseRequest(tenant=tenant, id=response_id), timeout=self._timeout_seconds
            )
        except grpc.aio.AioRpcError as error:
            raise _told(error) from error
        return response_of(found.response)

    async def chain(self, tenant: str, response_id: str) -> Sequence[StoredResponse]:
        """See ResponseStore.chain."""
        try:
            found = await self._stub.ListChain(
                pb.ListChainRequest(tenant=tenant, id=response_id), timeout=self._timeout_seconds
            )
        except grpc.aio.AioRpcError as error:
            raise _told(error) from error
        return [response_of(message) for message in found.responses]

    async def delete(self, tenant: str, response_id: str) -> None:
        """See ResponseStore.delete."""
        try:
            await self._stub.DeleteResponse(
                pb.DeleteResponseRequest(tenant=tenant, id=response_id), timeout=self._timeout_seconds
            )
        except grpc.aio.AioRpcError as error:
            raise _told(error) from error


def _told(error: grpc.aio.AioRpcError) -> WeftError:
    """The error of a failed call: a store that is slow or stopping counts as unreachable."""
    found = error_from_call(error, Reason.SERVICE_UNAVAILABLE)
    if found.reason in {Reason.DEADLINE_EXCEEDED, Reason.CANCELLED}:
        return WeftError(Reason.SERVICE_UNAVAILABLE, "response store timed out")
    return found


def response_message(response: StoredResponse) -> pb.StoredResponse:
    """An answer as it travels."""
    message = pb.StoredResponse(
        id=response.id,
        tenant=response.tenant,
        previous_id=response.previous_id,
        body=response.body,
        items=response.items,
    )
    message.create_time.FromDatetime(response.created_at)
    return message


def response_of(message: pb.StoredResponse) -> StoredResponse:
    """An answer as it came."""
    return StoredResponse(
        id=message.id,
        tenant=message.tenant,
        previous_id=message.previous_id,
        created_at=message.create_time.ToDatetime(UTC),
        body=message.body,
        items=message.items,
    )
