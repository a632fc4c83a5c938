"""The mesh that a command calls, and its resources as documents."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors import WeftError
from weft_app.cli.mesh_api import CALL_TIMEOUT_SECONDS, MeshApi, connect

PAGE_SIZE = 1000
Document = dict[str, Any]
Processes = Mapping[tuple[str, str], Document]
"""What is known of the process of an engine (`processId`, `restartCount`), by runner and model."""


class MeshDocuments:
    """Reads resources. Every failure is a WeftError with a reason."""

    def __init__(self, api: MeshApi) -> None:
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

    def instances(self, runner: str, line_count: int) -> list[Document]:
        """Returns what a runner says of its engines. Raises NO_RUNNER_AVAILABLE, WORKER_LOST."""
        found = self._api.get(f"/v1/admin/runners/{runner}/instances", lines=line_count)
        return list(found["instances"])

    def processes(self) -> Processes:
        """Returns what runners say of the processes of their engines; those that say nothing are left out."""
        with suppress(WeftError):
            found = self._api.get("/v1/admin/models")
            replicas = [each for model in found["items"] for each in model["replicas"]["members"]]
            engines = [*replicas, *found.get("unowned", ())]
            return {(each.get("runner", ""), each["model"]): each for each in engines}
        return {}


@contextmanager
def connect_documents(home: Path, timeout_seconds: float = CALL_TIMEOUT_SECONDS) -> Iterator[MeshDocuments]:
    """Connects to the mesh of a home. Raises SERVICE_UNAVAILABLE when none runs."""
    with connect(home, timeout_seconds) as api:
        yield MeshDocuments(api)
