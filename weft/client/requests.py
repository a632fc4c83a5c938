"""A synchronous client of the router's records of requests and clients.

from weft.client.requests import connect_requests

with connect_requests() as requests:
    print(requests.get("req_1f3a").state)
"""

from pathlib import Path

from weft.api.router.v1 import request_service_pb2, request_service_pb2_grpc
from weft.client._channel import ServiceClient, mesh_address
from weft.documents.request_documents import (
    ClientDocument,
    ClientList,
    RequestDocument,
    RequestList,
    client_document,
    request_document,
)

CALL_TIMEOUT_SECONDS = 10.0

pb = request_service_pb2


def connect_requests(
    target: str | None = None, *, home: Path | str | None = None, timeout_seconds: float = CALL_TIMEOUT_SECONDS
) -> "Requests":
    """Connects to the router at a gRPC target, or of the mesh that runs on `home`.

    Raises SERVICE_UNAVAILABLE when none runs.
    """
    return Requests(target or mesh_address(home), timeout_seconds)


class Requests(ServiceClient):
    """Calls on one router. Every failure is a WeftError with a reason."""

    def __init__(self, target: str, timeout_seconds: float = CALL_TIMEOUT_SECONDS) -> None:
        super().__init__(target, timeout_seconds)
        self._stub = request_service_pb2_grpc.RequestServiceStub(self._channel)

    def get(self, request_id: str, tenant: str = "") -> RequestDocument:
        """Returns one request of the tenant; empty: of any. Raises NOT_FOUND."""
        request = pb.GetRequestRequest(request_id=request_id, tenant=tenant)
        return request_document(self._call(self._stub.GetRequest, request).request)

    def under_way(self, limit: int = 0) -> RequestList:
        """Returns unfinished requests, the oldest first; `limit` 0: the router's default, 100."""
        found = self._call(self._stub.ListRequests, pb.ListRequestsRequest(limit=limit))
        items = tuple(map(request_document, found.requests))
        return RequestList(kind="RequestList", items=items, total=found.total_count)

    def clients(self) -> ClientList:
        """Returns recent clients, by id."""
        found = self._call(self._stub.ListClients, pb.ListClientsRequest())
        clients: list[ClientDocument] = [client_document(record) for record in found.clients]
        return ClientList(kind="ClientList", items=tuple(clients))
