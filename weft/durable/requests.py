"""The client of request records: the log, the clients and the figures of a router.

Every method raises SERVICE_UNAVAILABLE for a lost router. An empty tenant means all tenants.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeAlias

from weft.api.router.v1 import figures_pb2, request_pb2, request_service_pb2_grpc
from weft.api.router.v1 import request_service_pb2 as pb
from weft.durable.store_calls import store_calls
from weft.kernel.access.principal import VIEW_RUNNERS, Principal
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

TIMEOUT_SECONDS = 5.0
CANCEL_WAIT_SECONDS = 5.0
"""How long a cancellation waits for its request to end."""
DEFAULT_LISTED = 100
MAX_LISTED = 1_000
"""Maximum number of requests in a list."""
MAX_ENDED_WATCHED = 10_000
"""Maximum number of ended requests at the start of a watch."""
Selection: TypeAlias = pb.RequestSelection.ValueType
UNDER_WAY = pb.REQUEST_SELECTION_UNSPECIFIED


class RequestClient:
    """Client of a router's RequestService."""

    def __init__(self, router: Any, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """`router`: a channel to the router, or its servicer in this process."""
        stub = request_service_pb2_grpc.RequestServiceStub
        self._timeout_seconds = timeout_seconds
        self._calls = store_calls(router, stub, "router", timeout_seconds)

    async def request(self, request_id: str, tenant: str = "") -> request_pb2.RequestRecord:
        """Returns a request of the tenant. Raises NOT_FOUND."""
        wanted = pb.GetRequestRequest(request_id=request_id, tenant=tenant)
        record: request_pb2.RequestRecord = (await self._calls.ask("GetRequest", wanted)).request
        return record

    async def requests(
        self, limit: int = DEFAULT_LISTED, tenant: str = "", selection: Selection = UNDER_WAY
    ) -> pb.ListRequestsResponse:
        """Returns at most MAX_LISTED requests, by default unfinished ones, without their decisions.

        Unfinished ones come oldest first, ended ones latest first.
        """
        wanted = pb.ListRequestsRequest(limit=limit, tenant=tenant, selection=selection)
        listed: pb.ListRequestsResponse = await self._calls.ask("ListRequests", wanted)
        return listed

    async def watch(self, tenant: str = "", ended_limit: int = 0) -> AsyncGenerator[pb.WatchRequestsResponse]:
        """Yields requests including the last ended ones, then each that changes.

        Raises WATCH_LAGGED if the watcher reads too slowly, and SHUTTING_DOWN.
        """
        wanted = pb.WatchRequestsRequest(tenant=tenant, ended_limit=ended_limit)
        async with aclosing(self._calls.read("WatchRequests", wanted, "", is_timed=False)) as responses:
            async for response in responses:
                yield response

    async def cancel(self, request_id: str, tenant: str, cancelled_by: str) -> request_pb2.RequestRecord:
        """Cancels running requests with this id; returns the newest after its end.

        Raises NOT_FOUND, and INVALID_ARGUMENT naming `tenant` if several tenants have running requests with this id.
        """
        wanted = pb.CancelRequestRequest(request_id=request_id, tenant=tenant, requested_by=cancelled_by)
        limit = CANCEL_WAIT_SECONDS + self._timeout_seconds
        answer: pb.CancelRequestResponse = await self._calls.ask("CancelRequest", wanted, timeout_seconds=limit)
        return answer.request

    async def clients(self) -> pb.ListClientsResponse:
        """Returns recent clients, sorted by id."""
        clients: pb.ListClientsResponse = await self._calls.ask("ListClients", pb.ListClientsRequest())
        return clients

    async def limit_uses(self, tenant: str = "") -> pb.ListLimitUsesResponse:
        """Returns the use of a tenant's limits."""
        wanted = pb.ListLimitUsesRequest(tenant=tenant)
        uses: pb.ListLimitUsesResponse = await self._calls.ask("ListLimitUses", wanted)
        return uses

    async def figures(self, *, day: bool = False) -> figures_pb2.Figures:
        """Returns the figures of the last hour, or of the last day, over all tenants."""
        figures: figures_pb2.Figures = (await self._calls.ask("GetFigures", pb.GetFiguresRequest(day=day))).figures
        return figures

    async def watch_figures(self) -> AsyncGenerator[figures_pb2.Figures]:
        """Yields the figures of the last hour, then those of each completed step. Raises SHUTTING_DOWN."""
        async with aclosing(self._calls.read("WatchFigures", pb.WatchFiguresRequest(), "", is_timed=False)) as steps:
            async for step in steps:
                yield step.figures


def shown_to(caller: Principal, record: request_pb2.RequestRecord) -> request_pb2.RequestRecord:
    """Returns a record, without engine logs unless the caller may see runners."""
    if not caller.may(VIEW_RUNNERS):
        for attempt in record.receipt.attempts:
            attempt.ClearField("engine_log")
    return record


def not_remembered(request_id: str) -> WeftError:
    """Returns NOT_FOUND for a request that is unknown or belongs to another tenant."""
    return WeftError(
        Reason.NOT_FOUND,
        f"no request {request_id} is known; routers keep them for `router.records.keep_seconds` after their end, and a "
        "router that is killed loses those of its last seconds",
    )


def not_cancellable(request_id: str) -> WeftError:
    """Returns NOT_FOUND for cancelling a request that is unknown or belongs to another tenant."""
    return WeftError(
        Reason.NOT_FOUND,
        f"no request {request_id} is known; `weft get requests` (GET /v1/requests) lists those that run",
    )
