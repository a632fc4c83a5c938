"""What a router remembers of requests and clients: the port that readers use, and the one behind a channel."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import grpc

from weft.api.router.v1 import request_pb2, request_service_pb2, request_service_pb2_grpc
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call

if TYPE_CHECKING:
    from weft.api.router.v1.request_service_pb2_grpc import RequestServiceAsyncStub

REQUESTS_TIMEOUT_SECONDS = 5.0
DEFAULT_LISTED = 100
MAX_LISTED = 1_000
"""Requests in one list."""

pb = request_service_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsUnderWay:
    """Requests that go on."""

    requests: Sequence[request_pb2.RequestRecord]
    """The oldest first, without their decisions."""
    total: int
    """How many go on, listed or not."""


class RequestSource(Protocol):
    """Source of request records. Raises SERVICE_UNAVAILABLE for a lost router."""

    async def request(self, request_id: str, tenant: str = "") -> request_pb2.RequestRecord:
        """One request of the tenant; an empty tenant: any. Raises NOT_FOUND."""
        ...

    async def requests(self, limit: int = DEFAULT_LISTED, tenant: str = "") -> RequestsUnderWay:
        """Those that go on, of one tenant or, for an empty one, of all; at most MAX_LISTED."""
        ...

    async def clients(self) -> Sequence[request_pb2.ClientRecord]:
        """The clients that were seen lately, by id."""
        ...


class RemoteRequests:
    """A RequestSource whose router is behind a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = cast("RequestServiceAsyncStub", request_service_pb2_grpc.RequestServiceStub(channel))

    async def request(self, request_id: str, tenant: str = "") -> request_pb2.RequestRecord:
        """See RequestSource.request."""
        wanted = pb.GetRequestRequest(request_id=request_id, tenant=tenant)
        try:
            return (await self._stub.GetRequest(wanted, timeout=REQUESTS_TIMEOUT_SECONDS)).request
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error

    async def requests(self, limit: int = DEFAULT_LISTED, tenant: str = "") -> RequestsUnderWay:
        """See RequestSource.requests."""
        wanted = pb.ListRequestsRequest(limit=limit, tenant=tenant)
        try:
            response = await self._stub.ListRequests(wanted, timeout=REQUESTS_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error
        return RequestsUnderWay(requests=response.requests, total=response.total_count)

    async def clients(self) -> Sequence[request_pb2.ClientRecord]:
        """See RequestSource.clients."""
        try:
            return (await self._stub.ListClients(pb.ListClientsRequest(), timeout=REQUESTS_TIMEOUT_SECONDS)).clients
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error


def not_remembered(request_id: str) -> WeftError:
    """NOT_FOUND for a request that is unknown or another tenant's."""
    return WeftError(
        Reason.NOT_FOUND,
        f"no request {request_id} is known; routers keep them for an hour after their end, and not across a restart",
    )
