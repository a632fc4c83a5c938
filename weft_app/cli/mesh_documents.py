"""The mesh that a command calls, and its resources as documents."""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from weft.client._home import (
    ADDRESS_VARIABLES,
    URL_VARIABLE,
    FoundHome,
    Service,
    home_folder,
    mesh_address,
    mesh_ca_file,
    require_url,
)
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors import WeftError
from weft_app.cli.mesh_api import (
    CALL_TIMEOUT_SECONDS,
    Api,
    MeshApi,
    SocketConnection,
    api_socket,
    connection_to,
    own_url,
)

PAGE_SIZE = 1000
Document = dict[str, Any]
Processes = Mapping[tuple[str, str], Document]
"""What is known of the process of an engine (`processId`, `restartCount`), by runner and model."""


def connect(
    home: Path,
    timeout_seconds: float = CALL_TIMEOUT_SECONDS,
    service: Service = "registry",
    *,
    is_always_served: bool = True,
) -> AbstractContextManager[Api]:
    """Connects to the mesh of a home: that of WEFT_URL, the gateway of `weft up`, or else `service` over gRPC.

    `is_always_served`: whether every gateway serves what is asked for. Raises SERVICE_UNAVAILABLE when none runs.
    """
    if url := _url_elsewhere(home):
        return MeshApi(connection_to(url, mesh_ca_file(url, home), timeout_seconds), url)
    if is_always_served and (path := api_socket(home)) is not None:
        return MeshApi(SocketConnection(path, timeout_seconds), f"unix:{path}")
    mesh_address(home, service)  # raises where none runs, before gRPC is imported
    from weft_app.cli.mesh_grpc import GrpcApi  # noqa: PLC0415 - gRPC takes longer than the rest

    return GrpcApi(home, timeout_seconds)


def _url_elsewhere(home: Path) -> str:
    """Returns the URL of a mesh that WEFT_URL alone names; empty: it names none, or that of the home."""
    if not isinstance(home_folder(home), FoundHome) or any(map(os.environ.get, ADDRESS_VARIABLES.values())):
        return ""
    url = os.environ.get(URL_VARIABLE, "").strip().rstrip("/")
    return require_url(url) if url and url != own_url(home) else ""


class MeshDocuments:
    """Reads resources. Every failure is a WeftError with a reason."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def documents(self, kind: ResourceKind) -> list[Document]:
        """Returns the resources of one kind, by name."""
        return list(self._api.pages(f"/api/v1/{kind.plural}", pageSize=PAGE_SIZE))

    def document(self, kind: ResourceKind, name: str) -> Document:
        """Returns one resource. Raises NOT_FOUND or MODEL_NOT_FOUND."""
        found: Document = self._api.get(f"/api/v1/{kind.plural}/{name}")
        return found

    def names(self, kind: ResourceKind) -> Iterator[str]:
        """Yields the names of the resources of one kind."""
        return (each["name"] for each in self._api.pages(f"/api/v1/{kind.plural}", pageSize=PAGE_SIZE))

    def events(self, kind: ResourceKind | None, name: str, limit: int) -> list[Document]:
        """Returns recent events of one resource, one kind, or all, oldest first."""
        found = self._api.get("/api/v1/events", kind=kind and kind.value, name=name, limit=limit)
        return list(found["items"])

    def processes(self) -> Processes:
        """Returns what runners say of the processes of their engines; those that say nothing are left out."""
        with suppress(WeftError):
            found = self._api.get("/v1/admin/models")
            replicas = [each for model in found["items"] for each in model["replicas"]["members"]]
            return processes_of([*replicas, *found.get("unowned", ())])
        return {}


def processes_of(engines: list[Document]) -> Processes:
    """Returns the processes of engines by runner and model."""
    return {(each.get("runner", ""), each["model"]): each for each in engines}


@contextmanager
def connect_documents(home: Path, timeout_seconds: float = CALL_TIMEOUT_SECONDS) -> Iterator[MeshDocuments]:
    """Connects to the mesh of a home. Raises SERVICE_UNAVAILABLE when none runs."""
    with connect(home, timeout_seconds) as api:
        yield MeshDocuments(api)
