"""The resources of a mesh as documents: over its HTTP API, or over gRPC where the home has no gateway."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import override

from weft.documents.resource_kinds import ResourceKind
from weft_app.cli.mesh_api import CALL_TIMEOUT_SECONDS, MeshApi, api_socket

if TYPE_CHECKING:
    from weft.client.resources import Registry

PAGE_SIZE = 1000
Document = dict[str, Any]


class MeshDocuments(Protocol):
    """Reads resources. Every failure is a WeftError with a reason."""

    def documents(self, kind: ResourceKind) -> list[Document]:
        """Returns the resources of one kind, by name."""
        ...

    def document(self, kind: ResourceKind, name: str) -> Document:
        """Returns one resource. Raises NOT_FOUND or MODEL_NOT_FOUND."""
        ...

    def names(self, kind: ResourceKind) -> Iterator[str]:
        """Yields the names of the resources of one kind."""
        ...

    def events(self, kind: ResourceKind | None, name: str, limit: int) -> list[Document]:
        """Returns recent events of one resource, one kind, or all, oldest first."""
        ...


@contextmanager
def connect_documents(home: Path, timeout_seconds: float = CALL_TIMEOUT_SECONDS) -> Iterator[MeshDocuments]:
    """Connects to the mesh of a home. Raises SERVICE_UNAVAILABLE when none runs."""
    path = api_socket(home)
    if path is not None:
        with MeshApi(path, timeout_seconds) as api:
            yield HttpDocuments(api)
        return
    from weft.client.resources import connect_registry  # noqa: PLC0415 - gRPC takes longer than the rest

    with connect_registry(home=home, timeout_seconds=timeout_seconds) as registry:
        yield RegistryDocuments(registry)


class HttpDocuments(MeshDocuments):
    """Resources by the HTTP API."""

    def __init__(self, api: MeshApi) -> None:
        self._api = api

    @override
    def documents(self, kind: ResourceKind) -> list[Document]:
        return list(self._api.pages(f"/api/v1/{kind.plural}", pageSize=PAGE_SIZE))

    @override
    def document(self, kind: ResourceKind, name: str) -> Document:
        found: Document = self._api.get(f"/api/v1/{kind.plural}/{name}")
        return found

    @override
    def names(self, kind: ResourceKind) -> Iterator[str]:
        return (each["name"] for each in self._api.pages(f"/api/v1/{kind.plural}", pageSize=PAGE_SIZE))

    @override
    def events(self, kind: ResourceKind | None, name: str, limit: int) -> list[Document]:
        found = self._api.get("/api/v1/events", kind=kind and kind.value, name=name, limit=limit)
        return list(found["items"])


class RegistryDocuments(MeshDocuments):
    """Resources by the registry's gRPC API, as the same documents."""

    def __init__(self, registry: "Registry") -> None:
        self._registry = registry

    @override
    def documents(self, kind: ResourceKind) -> list[Document]:
        from weft.documents.resources import plain  # noqa: PLC0415 - it needs protobuf

        return [plain(document) for document in self._registry.documents(kind)]

    @override
    def document(self, kind: ResourceKind, name: str) -> Document:
        from weft.documents.resources import plain  # noqa: PLC0415 - as above

        return plain(self._registry.document(kind, name))

    @override
    def names(self, kind: ResourceKind) -> Iterator[str]:
        return self._registry.names(kind)

    @override
    def events(self, kind: ResourceKind | None, name: str, limit: int) -> list[Document]:
        from weft.documents.codec import document_of  # noqa: PLC0415 - as above

        return [document_of(event) for event in self._registry.events(kind, name, limit)]
