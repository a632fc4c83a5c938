"""The requests and clients of a mesh as documents: over its HTTP API, or over gRPC where the home has no gateway."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typing_extensions import override

from weft_app.cli.mesh_api import MeshApi, api_socket

CALL_TIMEOUT_SECONDS = 20.0
"""Timeout of a call: a cancelled request is waited for until it has ended."""
Document = dict[str, Any]


class MeshRequests:
    """Reads and cancels requests by the HTTP API. Every failure is a WeftError with a reason."""

    def __init__(self, api: Any) -> None:
        self._api = api

    def get(self, request_id: str) -> Document:
        """Returns one request, of any tenant. Raises NOT_FOUND."""
        return dict(self._api.get(f"/v1/requests/{request_id}", allTenants=1))

    def listed(self, limit: int, state: str) -> Document:
        """Returns the list of requests that run, or that have ended in a state."""
        return dict(self._api.get("/v1/requests", limit=limit, state=state, allTenants=1))

    def clients(self) -> Document:
        """Returns the list of clients that were seen lately."""
        return dict(self._api.get("/v1/clients"))

    def cancel(self, request_id: str, tenant: str) -> Document:
        """Cancels a request of a tenant, empty: of any; returns it as it ended."""
        path = f"/v1/requests/{request_id}/cancel"
        return dict(self._api.post(path, tenant=tenant) if tenant else self._api.post(path, allTenants=1))


@contextmanager
def connect_requests(home: Path) -> Iterator[MeshRequests]:
    """Connects to the mesh of a home. Raises SERVICE_UNAVAILABLE when none runs."""
    path = api_socket(home)
    if path is not None:
        with MeshApi(path, CALL_TIMEOUT_SECONDS) as api:
            yield MeshRequests(api)
        return
    from weft.client.requests import connect_requests as connect_router  # noqa: PLC0415 - see `connect_documents`

    with connect_router(home=home) as requests:
        yield _RouterRequests(requests)


class _RouterRequests(MeshRequests):
    """The same by the router's gRPC API."""

    @override
    def get(self, request_id: str) -> Document:
        return _document_of(self._api.get(request_id))

    @override
    def listed(self, limit: int, state: str) -> Document:
        found = self._api.ended(limit, state) if state else self._api.under_way(limit)
        return _document_of(found)

    @override
    def clients(self) -> Document:
        return _document_of(self._api.clients())

    @override
    def cancel(self, request_id: str, tenant: str) -> Document:
        return _document_of(self._api.cancel(request_id, tenant))


def _document_of(message: Any) -> Document:
    from weft.documents.codec import document_of  # noqa: PLC0415 - it needs protobuf

    return document_of(message)
