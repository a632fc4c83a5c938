"""Operations, and the accelerator memory of hosts, as sources of a watch."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Protocol

from google.protobuf.message import Message
from typing_extensions import override

from gateway.answers.answer_builder import encode_json
from gateway.watch.source import Change, WatchCaller, WatchSource, delete, put, synced
from weft.api.operations.v1 import operation_service_pb2 as pb
from weft.api.registry.v1 import lease_service_pb2
from weft.documents.codec import document_of
from weft.kernel.principal import Access, Resource, Role

PAST_OPERATIONS = 100
_VIEW_OPERATIONS = Access(Resource.OPERATIONS, Role.VIEW)


class OperationsWatch(Protocol):
    """Operations and memory of the registry as they change; `gateway.operations.OperationsClient` implements it.

    Both raise the WeftError that the registry answers, and SERVICE_UNAVAILABLE when it cannot be reached.
    """

    def watch_all(self, past_count: int) -> AsyncGenerator[pb.WatchOperationsResponse]:
        """Yields operations and at most `past_count` that have ended, `synced`, then each that changes."""
        ...

    def watch_memory(self) -> AsyncGenerator[lease_service_pb2.WatchHostMemoryResponse]:
        """Yields the VRAM ledger of each host, `synced`, then each that changes."""
        ...


class OperationSource(WatchSource):
    """Operations that have not ended and the newest that have, then each that changes; its name is `operations/<id>`.

    None is ever deleted: the registry keeps them for days.
    """

    kind = "operation"
    access = _VIEW_OPERATIONS
    by_name = False

    def __init__(self, operations: OperationsWatch) -> None:
        self._operations = operations

    @override
    async def changes(self, caller: WatchCaller) -> AsyncGenerator[Change]:
        async with aclosing(self._operations.watch_all(PAST_OPERATIONS)) as responses:
            async for response in responses:
                if response.HasField("operation"):
                    yield put(response.operation.name, partial(_encoded, response.operation))
                elif response.synced:
                    yield synced()


class MemorySource(WatchSource):
    """Hosts with their devices, their leases and who waits; its name is the host's."""

    kind = "memory"
    access = _VIEW_OPERATIONS
    by_name = False

    def __init__(self, operations: OperationsWatch) -> None:
        self._operations = operations

    @override
    async def changes(self, caller: WatchCaller) -> AsyncGenerator[Change]:
        async with aclosing(self._operations.watch_memory()) as responses:
            async for response in responses:
                match response.WhichOneof("kind"):
                    case "host":
                        yield put(response.host.host, partial(_encoded, response.host))
                    case "deleted_host":
                        yield delete(response.deleted_host)
                    case "synced":
                        yield synced()


def _encoded(message: Message) -> bytes:
    return encode_json(document_of(message))
