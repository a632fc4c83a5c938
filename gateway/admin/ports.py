"""What the admin surface needs from the rest of the mesh; tests script it."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.api.operations.v1 import operation_pb2
from weft.api.runner.v1 import runner_service_pb2
from weft.dispatch.placement import QueueSource
from weft.documents.operation_documents import AuditList, HostMemoryDocument, OperationDocument, OperationList


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOperation:
    """What somebody wants done."""

    action: operation_pb2.OperationAction
    """Only ever read."""
    request_id: str
    requested_by: str
    authorization: str
    """The token or signatures that governance asks for; empty: none."""


class OperationsPort(Protocol):
    """Who carries operations out; see `gateway.admin.operations_client.OperationsClient`.

    Every method raises the WeftError that the registry answers, SERVICE_UNAVAILABLE when it cannot be reached, and
    DEADLINE_EXCEEDED when it does not answer in time.
    """

    async def create(self, wanted: NewOperation) -> OperationDocument:
        """Have it done; the operation that the same request id created before, if there is one."""
        ...

    async def get(self, name: str) -> OperationDocument:
        """One operation."""
        ...

    async def list_page(self, page_size: int, page_token: str, *, unfinished_only: bool) -> OperationList:
        """A page of operations, newest first; `page_size` 0 is the registry's own."""
        ...

    def watch(self, name: str) -> AsyncGenerator[OperationDocument]:
        """The operation as it is now, then with every change until it has ended."""
        ...

    async def cancel(self, name: str, requested_by: str) -> OperationDocument:
        """Ask for its end."""
        ...

    async def audit(self, after_sequence: int, page_size: int) -> AuditList:
        """A part of the audit log."""
        ...

    async def host_memory(self, host: str) -> Sequence[HostMemoryDocument]:
        """The book of accelerator memory, of one host or, for an empty name, all."""
        ...


class InstanceSource(Protocol):
    """Who knows what runners say of their instances; see `gateway.admin.runner_client.RunnerDescriptions`."""

    async def instances(self, runners: Sequence[str]) -> dict[str, dict[str, runner_service_pb2.InstanceDescription]]:
        """By runner and model. A runner that does not answer in time is left out. Never raises."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminPorts:
    """All of them."""

    operations: OperationsPort
    instances: InstanceSource
    queues: QueueSource
