"""The resources of a mesh as documents: over its HTTP API, or over gRPC where the home has no gateway."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from typing_extensions import override

from weft.client._home import mesh_address
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors import WeftError
from weft_app.cli.mesh_api import CALL_TIMEOUT_SECONDS, MeshApi, api_socket

PAGE_SIZE = 1000
Document = dict[str, Any]
Processes = Mapping[tuple[str, str], Document]
"""What is known of the process of an engine (`processId`, `restartCount`), by runner and model."""
MAX_ASKED_AT_ONCE = 16
"""Runners that are asked at once; one that does not answer must not delay the others."""


class MeshDocuments:
    """Reads resources by the HTTP API. Every failure is a WeftError with a reason."""

    def __init__(self, api: Any) -> None:
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

    def processes(self, runners: Sequence[Document]) -> Processes:  # noqa: ARG002 - over gRPC these are asked
        """Returns what runners say of the processes of their engines; those that say nothing are left out."""
        with suppress(WeftError):
            found = self._api.get("/v1/admin/models")
            replicas = [each for model in found["items"] for each in model["replicas"]["members"]]
            return {(each.get("runner", ""), each["model"]): each for each in [*replicas, *found.get("unowned", ())]}
        return {}


@contextmanager
def connect_documents(home: Path, timeout_seconds: float = CALL_TIMEOUT_SECONDS) -> Iterator[MeshDocuments]:
    """Connects to the mesh of a home. Raises SERVICE_UNAVAILABLE when none runs."""
    path = api_socket(home)
    if path is not None:
        with MeshApi(path, timeout_seconds) as api:
            yield MeshDocuments(api)
        return
    mesh_address(home, "registry")  # raises where none runs, before gRPC is imported
    from weft.client.resources import connect_registry  # noqa: PLC0415 - gRPC takes longer than the rest

    with connect_registry(home=home, timeout_seconds=timeout_seconds) as registry:
        yield RegistryDocuments(registry)


class RegistryDocuments(MeshDocuments):
    """Reads the same documents by the registry's gRPC API."""

    @override
    def documents(self, kind: ResourceKind) -> list[Document]:
        from weft.documents.resources import plain  # noqa: PLC0415 - it needs protobuf

        return [plain(document) for document in self._api.documents(kind)]

    @override
    def document(self, kind: ResourceKind, name: str) -> Document:
        from weft.documents.resources import plain  # noqa: PLC0415 - as above

        return plain(self._api.document(kind, name))

    @override
    def names(self, kind: ResourceKind) -> Iterator[str]:
        yield from self._api.names(kind)

    @override
    def events(self, kind: ResourceKind | None, name: str, limit: int) -> list[Document]:
        from weft.documents.codec import document_of  # noqa: PLC0415 - as above

        return [document_of(event) for event in self._api.events(kind, name, limit)]

    @override
    def processes(self, runners: Sequence[Document]) -> Processes:
        return described_processes(runners)


def described_processes(runners: Sequence[Document]) -> Processes:
    """Asks runners, over gRPC, for the processes of their engines."""
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - for these alone

    from weft.client.resources import describe_runner  # noqa: PLC0415 - as above
    from weft.documents.codec import document_of  # noqa: PLC0415 - as above

    active = [runner for runner in runners if runner["status"]["state"] == "active"]
    with ThreadPoolExecutor(MAX_ASKED_AT_ONCE) as pool:
        answers = list(pool.map(lambda runner: describe_runner(runner["status"]["address"]), active))
    return {
        (runner["name"], instance.model): document_of(instance)
        for runner, answer in zip(active, answers, strict=True)
        for instance in (answer.instances if answer is not None else ())
    }
