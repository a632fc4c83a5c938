"""A synchronous client of the router's records of requests and clients.

from weft.client.requests import connect_requests

with connect_requests() as requests:
    print(requests.get("req_1f3a"))
"""

from weft.api.router.v1 import request_pb2, request_service_pb2, request_service_pb2_grpc
from weft.client._channel import MeshServiceClient

pb = request_service_pb2


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


connect_requests = Requests.connect
