"""A synchronous client of the router's records of requests and clients.

from weft.client.requests import connect_requests

with connect_requests() as requests:
    print(requests.get("req_1f3a"))
"""

from collections.abc import Iterator

from weft.api.router.v1 import figures_pb2, request_pb2, request_service_pb2, request_service_pb2_grpc
from weft.client._channel import MeshServiceClient
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.field_rules import enum_words
from weft.kernel.reasons import Reason

pb = request_service_pb2
_OUTCOMES = {word: number for number, word in enum_words(pb.RequestSelection.DESCRIPTOR).items()}


class Requests(MeshServiceClient):
    """Calls on one router. Every failure is a WeftError with a reason."""

    def __init__(self, target: str, timeout_seconds: float | None = None) -> None:
        super().__init__(target, timeout_seconds)
        self._stub = request_service_pb2_grpc.RequestServiceStub(self._channel)

    def get(self, request_id: str, tenant: str = "") -> request_pb2.RequestRecord:
        """Returns one request of the tenant; empty: of any. Raises NOT_FOUND."""
        request = pb.GetRequestRequest(request_id=request_id, tenant=tenant)
        record: request_pb2.RequestRecord = self._call(self._stub.GetRequest, request).request
        return record

    def under_way(self, limit: int = 0) -> pb.ListRequestsResponse:
        """Returns unfinished requests, the oldest first; `limit` 0: the router's default, 100."""
        found: pb.ListRequestsResponse = self._call(self._stub.ListRequests, pb.ListRequestsRequest(limit=limit))
        return found

    def ended(self, limit: int = 0, outcome: str = "ended") -> pb.ListRequestsResponse:
        """Returns ended requests that are remembered, the last first; `limit` 0: the router's default, 100.

        Raises INVALID_ARGUMENT naming `state` for an outcome other than ended (all), completed, failed or cancelled.
        """
        if outcome not in _OUTCOMES:
            raise invalid_field("state", f"must be one of {', '.join(_OUTCOMES)}")
        wanted = pb.ListRequestsRequest(limit=limit, selection=_OUTCOMES[outcome])  # type: ignore[arg-type]  # a number
        found: pb.ListRequestsResponse = self._call(self._stub.ListRequests, wanted)
        return found

    def watch(self, tenant: str = "", ended_limit: int = 0) -> Iterator[pb.WatchRequestsResponse]:
        """Yields the requests under way and the last ended ones, then each that changes, of the tenant; empty: of any.

        Raises WATCH_LAGGED or SERVICE_UNAVAILABLE when it ends.
        """
        call = self._stub.WatchRequests(pb.WatchRequestsRequest(tenant=tenant, ended_limit=ended_limit))
        yield from self._stream(call)
        raise WeftError(Reason.SERVICE_UNAVAILABLE, f"the mesh at {self._target} ended the watch")

    def cancel(self, request_id: str, tenant: str = "") -> request_pb2.RequestRecord:
        """Cancels a running request of the tenant (empty: of any); returns it as it ended.

        Raises NOT_FOUND, and INVALID_ARGUMENT naming `tenant` where requests of several tenants have the id.
        """
        request = pb.CancelRequestRequest(request_id=request_id, tenant=tenant)
        record: request_pb2.RequestRecord = self._call(self._stub.CancelRequest, request).request
        return record

    def clients(self) -> pb.ListClientsResponse:
        """Returns recent clients, by id."""
        found: pb.ListClientsResponse = self._call(self._stub.ListClients, pb.ListClientsRequest())
        return found

    def limit_uses(self, tenant: str = "") -> pb.ListLimitUsesResponse:
        """Returns what is used of the limits of a tenant; empty: of all."""
        request = pb.ListLimitUsesRequest(tenant=tenant)
        found: pb.ListLimitUsesResponse = self._call(self._stub.ListLimitUses, request)
        return found

    def figures(self) -> figures_pb2.Figures:
        """Returns what was counted in the last hour, of all tenants."""
        found: figures_pb2.Figures = self._call(self._stub.GetFigures, pb.GetFiguresRequest()).figures
        return found


connect_requests = Requests.connect
