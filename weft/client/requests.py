"""A synchronous client of the router: requests as they change, and what is used of limits.

from weft.client.requests import connect_requests

with connect_requests() as requests:
    for response in requests.watch():
        print(response.requests)
"""

from collections.abc import Iterator

from weft.api.router.v1 import request_service_pb2, request_service_pb2_grpc
from weft.client._channel import MeshServiceClient
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

pb = request_service_pb2


class Requests(MeshServiceClient):
    """Calls on one router. Every failure is a WeftError with a reason."""

    def __init__(self, target: str, timeout_seconds: float | None = None) -> None:
        super().__init__(target, timeout_seconds)
        self._stub = request_service_pb2_grpc.RequestServiceStub(self._channel)

    def watch(self, tenant: str = "", ended_limit: int = 0) -> Iterator[pb.WatchRequestsResponse]:
        """Yields the requests under way and the last ended ones, then each that changes, of the tenant; empty: of any.

        Raises WATCH_LAGGED or SERVICE_UNAVAILABLE when it ends.
        """
        call = self._stub.WatchRequests(pb.WatchRequestsRequest(tenant=tenant, ended_limit=ended_limit))
        yield from self._stream(call)
        raise WeftError(Reason.SERVICE_UNAVAILABLE, f"the mesh at {self._target} ended the watch")

    def limit_uses(self, tenant: str = "") -> pb.ListLimitUsesResponse:
        """Returns what is used of the limits of a tenant; empty: of all."""
        request = pb.ListLimitUsesRequest(tenant=tenant)
        found: pb.ListLimitUsesResponse = self._call(self._stub.ListLimitUses, request)
        return found


connect_requests = Requests.connect
