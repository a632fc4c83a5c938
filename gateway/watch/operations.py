"""Operations, and the accelerator memory of hosts, as sources of a watch."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from typing_extensions import override

from gateway.operations import OperationsClient
from gateway.watch.source import Change, WatchCaller, WatchSource, delete, put_message, synced
from weft.kernel.principal import Access, Resource, Role

PAST_OPERATIONS = 100
_VIEW_OPERATIONS = Access(Resource.OPERATIONS, Role.VIEW)


class OperationSource(WatchSource):
    """Operations that have not ended and the newest that have, then each that changes; its name is `operations/<id>`.

    None is ever deleted: the registry keeps them for days.
    """

    kind = "operation"
    access = _VIEW_OPERATIONS
    by_name = False

    def __init__(self, operations: OperationsClient) -> None:
        self._operations = operations

    @override
    async def changes(self, caller: WatchCaller) -> AsyncGenerator[Change]:
        async with aclosing(self._operations.watch_all(PAST_OPERATIONS)) as responses:
            async for response in responses:
                if response.HasField("operation"):
                    yield put_message(response.operation.name, response.operation)
                elif response.synced:
                    yield synced()


class MemorySource(WatchSource):
    """Hosts with their devices, their leases and who waits; its name is the host's."""

    kind = "memory"
    access = _VIEW_OPERATIONS
    by_name = False

    def __init__(self, operations: OperationsClient) -> None:
        self._operations = operations

    @override
    async def changes(self, caller: WatchCaller) -> AsyncGenerator[Change]:
        async with aclosing(self._operations.watch_memory()) as responses:
            async for response in responses:
                match response.WhichOneof("kind"):
                    case "host":
                        yield put_message(response.host.host, response.host)
                    case "deleted_host":
                        yield delete(response.deleted_host)
                    case "synced":
                        yield synced()
