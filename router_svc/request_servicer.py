"""RequestService over the router's own log, and the same for readers in this process."""

from collections.abc import Sequence
from typing import Any

import grpc

from router_svc.client_registry import ClientRegistry
from router_svc.request_log import RequestLog
from router_svc.request_records import request_record
from weft.api.router.v1 import request_pb2, request_service_pb2_grpc
from weft.api.router.v1 import request_service_pb2 as pb
from weft.dispatch.request_records import DEFAULT_LISTED, MAX_LISTED, RequestSource, RequestsUnderWay, not_remembered
from weft.kernel.clock import Clock
from weft.kernel.errors import invalid_field
from weft.kernel.names import MAX_REQUEST_ID_CHARS, MAX_TENANT_CHARS, require_token
from weft.kernel.rpc import answering
from weft.kernel.rpc_auth import caller

Context = grpc.aio.ServicerContext[Any, Any]


class LocalRequests:
    """A RequestSource over the log and the clients of this process."""

    def __init__(self, log: RequestLog, clients: ClientRegistry, clock: Clock) -> None:
        self._log = log
        self._clients = clients
        self._clock = clock

    async def request(self, request_id: str, tenant: str = "") -> request_pb2.RequestRecord:
        """See RequestSource.request."""
        entry = self._log.find(request_id, self._clock.monotonic(), tenant)
        if entry is None:
            raise not_remembered(request_id)
        return request_record(entry, with_decisions=True)

    async def requests(self, limit: int = DEFAULT_LISTED, tenant: str = "") -> RequestsUnderWay:
        """See RequestSource.requests."""
        entries, total = self._log.under_way(min(limit, MAX_LISTED), tenant)
        return RequestsUnderWay(
            requests=[request_record(entry, with_decisions=False) for entry in entries], total=total
        )

    async def clients(self) -> Sequence[request_pb2.ClientRecord]:
        """See RequestSource.clients."""
        return self._clients.records()


class RequestServicer(request_service_pb2_grpc.RequestServiceServicer):
    """See RequestService."""

    def __init__(self, requests: RequestSource) -> None:
        self._requests = requests

    async def GetRequest(self, request: pb.GetRequestRequest, context: Context) -> pb.GetRequestResponse:  # noqa: N802
        """See RequestService.GetRequest."""
        async with answering(context):
            request_id = require_token(request.request_id, "request_id", MAX_REQUEST_ID_CHARS)
            tenant = _tenant_of(request.tenant)
            return pb.GetRequestResponse(request=await self._requests.request(request_id, tenant))
        raise AssertionError("abort has raised")

    async def ListRequests(  # noqa: N802 - the rpc's name
        self, request: pb.ListRequestsRequest, context: Context
    ) -> pb.ListRequestsResponse:
        """See RequestService.ListRequests."""
        async with answering(context):
            if request.limit < 0:
                raise invalid_field("limit", "must not be negative")
            tenant = _tenant_of(request.tenant)
            found = await self._requests.requests(request.limit or DEFAULT_LISTED, tenant)
            return pb.ListRequestsResponse(requests=found.requests, total_count=found.total)
        raise AssertionError("abort has raised")

    async def ListClients(  # noqa: N802 - the rpc's name
        self,
        request: pb.ListClientsRequest,  # noqa: ARG002 - it asks for all of them
        context: Context,
    ) -> pb.ListClientsResponse:
        """See RequestService.ListClients."""
        async with answering(context):
            return pb.ListClientsResponse(clients=await self._requests.clients())
        raise AssertionError("abort has raised")


def _tenant_of(claimed: str) -> str:
    """Whose requests are asked for; empty: everybody's, which a caller whose tenant is fixed cannot ask for."""
    tenant = require_token(claimed, "tenant", MAX_TENANT_CHARS) if claimed else ""
    known = caller()
    return tenant if known.names_tenants else known.tenant_for(tenant, "tenant")
