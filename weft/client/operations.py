"""A synchronous client of operations, the VRAM ledger and the audit log.

from weft.client.operations import connect_operations

with connect_operations() as operations:
    operation = operations.create(load_action("qwen", LoadSettings(context_tokens=8192)))
    for operation in operations.watch(operation.name):
        print(operation.stage, operation.progress)
"""

import getpass
import os
import socket
from collections.abc import Iterator
from contextlib import suppress

from weft.api.operations.v1 import operation_pb2, operation_service_pb2, operation_service_pb2_grpc
from weft.api.registry.v1 import lease_service_pb2, lease_service_pb2_grpc
from weft.client._channel import MeshServiceClient
from weft.kernel.errors import WeftError
from weft.kernel.names import new_id
from weft.kernel.reasons import Reason

PAGE_SIZE = 1000
OPERATION_PREFIX = "operations/"

pb = operation_service_pb2


class Operations(MeshServiceClient):
    """Calls on one registry. Every failure is a WeftError with a reason."""

    service = "registry"

    def __init__(self, target: str, timeout_seconds: float | None = None) -> None:
        super().__init__(target, timeout_seconds)
        self._stub = operation_service_pb2_grpc.OperationServiceStub(self._channel)
        self._leases = lease_service_pb2_grpc.LeaseServiceStub(self._channel)

    def create(
        self, action: operation_pb2.OperationAction, *, request_id: str = "", authorization: str = ""
    ) -> operation_pb2.Operation:
        """Creates an operation. Raises OPERATION_REFUSED where governance requires more authorization."""
        request = pb.CreateOperationRequest(
            request_id=request_id or new_id("op"),
            action=action,
            requested_by=requester("cli"),
            authorization=authorization,
        )
        operation: operation_pb2.Operation = self._call(self._stub.CreateOperation, request).operation
        return operation

    def get(self, name: str) -> operation_pb2.Operation:
        """Returns one operation, by "operations/<id>" or its id alone. Raises NOT_FOUND."""
        request = pb.GetOperationRequest(name=operation_name(name))
        operation: operation_pb2.Operation = self._call(self._stub.GetOperation, request).operation
        return operation

    def cancel(self, name: str) -> operation_pb2.Operation:
        """Cancels an operation."""
        request = pb.CancelOperationRequest(name=operation_name(name), requested_by=requester("cli"))
        operation: operation_pb2.Operation = self._call(self._stub.CancelOperation, request).operation
        return operation

    def watch(self, name: str, timeout_seconds: float | None = None) -> Iterator[operation_pb2.Operation]:
        """Yields the operation now and at every change, until it has ended."""
        request = pb.WatchOperationRequest(name=operation_name(name))
        for response in self._stream(self._stub.WatchOperation(request, timeout=timeout_seconds)):
            yield response.operation

    def watch_all(self, past_count: int) -> Iterator[pb.WatchOperationsResponse]:
        """Yields operations and at most `past_count` that have ended, `synced`, then each that changes."""
        yield from self._stream(self._stub.WatchOperations(pb.WatchOperationsRequest(past_count=past_count)))

    def audit(self, after_sequence: int = 0) -> Iterator[pb.AuditEntry]:
        """Yields the audit log, oldest entry first. Raises SERVICE_UNAVAILABLE for a registry that repeats entries."""
        while True:
            request = pb.ListAuditEntriesRequest(page_size=PAGE_SIZE, after_sequence=after_sequence)
            page = self._call(self._stub.ListAuditEntries, request)
            if not page.entries:
                return
            if page.entries[-1].sequence <= after_sequence:
                message = f"the registry repeats audit entries: {page.entries[-1].sequence} came after {after_sequence}"
                raise WeftError(Reason.SERVICE_UNAVAILABLE, message)
            yield from page.entries
            after_sequence = page.entries[-1].sequence

    def audit_head(self) -> pb.AuditHead:
        """Returns number and hash of the newest entry; 0 and an empty text for an empty log."""
        head: pb.AuditHead = self._call(self._stub.ListAuditEntries, pb.ListAuditEntriesRequest(page_size=1)).head
        return head

    def host_memory(self, host: str = "") -> list[lease_service_pb2.HostMemory]:
        """Returns the VRAM ledger of one host, or of all hosts."""
        request = lease_service_pb2.ListHostMemoryRequest(host=host)
        return list(self._call(self._leases.ListHostMemory, request).hosts)


connect_operations = Operations.connect


_ENDED = frozenset(
    {
        operation_pb2.Operation.STATE_SUCCEEDED,
        operation_pb2.Operation.STATE_FAILED,
        operation_pb2.Operation.STATE_CANCELLED,
    }
)


def has_ended(operation: operation_pb2.Operation) -> bool:
    """Whether an operation has succeeded, failed or was cancelled."""
    return operation.state in _ENDED


def operation_name(name: str) -> str:
    """Returns the name of an operation, which may be given by its id alone."""
    return name if name.startswith(OPERATION_PREFIX) else OPERATION_PREFIX + name


def requester(surface: str) -> str:
    """Returns the requester for the audit log: "cli:alice@laptop"."""
    user = str(os.getuid())
    with suppress(KeyError, OSError):
        user = getpass.getuser()
    return f"{surface}:{user}@{socket.gethostname()}"[:256]
