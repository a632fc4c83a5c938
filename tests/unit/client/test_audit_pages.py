"""The audit log as the client reads it, page by page."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from weft.api.operations.v1 import operation_service_pb2 as pb
from weft.api.operations.v1 import operation_service_pb2_grpc
from weft.client.operations import Operations
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


class _Log(operation_service_pb2_grpc.OperationServiceServicer):
    """A log of five entries in pages of two; `stuck` answers the first page whatever is asked for."""

    def __init__(self, *, stuck: bool) -> None:
        self._stuck = stuck

    def ListAuditEntries(  # noqa: N802 - the name in the proto
        self, request: pb.ListAuditEntriesRequest, context: grpc.ServicerContext
    ) -> pb.ListAuditEntriesResponse:
        first = 0 if self._stuck else request.after_sequence
        numbers = range(first + 1, min(first + 3, 6))
        return pb.ListAuditEntriesResponse(entries=[pb.AuditEntry(sequence=number) for number in numbers])


@contextmanager
def _operations(*, stuck: bool) -> Iterator[Operations]:
    server = grpc.server(ThreadPoolExecutor(1))
    log = _Log(stuck=stuck)  # type: ignore[abstract]  # no other call is made
    operation_service_pb2_grpc.add_OperationServiceServicer_to_server(log, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with Operations.connect(f"127.0.0.1:{port}") as operations:
            yield operations
    finally:
        server.stop(None)


def test_pages_are_read_to_the_end() -> None:
    with _operations(stuck=False) as operations:
        assert [entry.sequence for entry in operations.audit()] == [1, 2, 3, 4, 5]


def test_a_registry_that_repeats_entries_is_not_asked_for_ever() -> None:
    with _operations(stuck=True) as operations, pytest.raises(WeftError, match="repeats audit entries") as refusal:
        list(operations.audit())
    assert refusal.value.reason is Reason.SERVICE_UNAVAILABLE
