"""The sources of a watch besides resources and queues: events, operations, memory, requests, figures and tasks."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial

from typing_extensions import override

from gateway.answers.answer_builder import encode_json
from gateway.operations import OperationsClient
from gateway.registry_client import RegistryClient
from gateway.tasks.handlers import task_json
from gateway.tasks.task_apis import TaskApis
from gateway.watch.source import Change, ChangeType, WatchCaller, WatchSource, delete, put, put_message, synced
from weft.api.router.v1.figures_pb2 import Figures
from weft.api.router.v1.request_pb2 import RequestRecord
from weft.api.router.v1.request_service_pb2 import WatchRequestsResponse
from weft.api.router.v1.task_pb2 import Task
from weft.durable.requests import RequestClient
from weft.durable.tasks import TaskClient
from weft.kernel.principal import VIEW_REQUESTS, Access, Resource, Role

_VIEW_TELEMETRY = Access(Resource.TELEMETRY, Role.VIEW)
PAST_EVENTS = 100


class EventSource(WatchSource):
    """The newest events, then every new one, named by sequence; none is ever deleted."""

    kind = "event"
    access = _VIEW_TELEMETRY

    def __init__(self, registry: RegistryClient) -> None:
        self._registry = registry

    @override
    async def changes(self, caller: WatchCaller) -> AsyncGenerator[Change]:
        async with aclosing(self._registry.follow_events(PAST_EVENTS)) as events:
            async for event in events:
                yield synced() if event is None else put_message(str(event.sequence), event)


PAST_OPERATIONS = 100
_VIEW_OPERATIONS = Access(Resource.OPERATIONS, Role.VIEW)


class OperationSource(WatchSource):
    """Operations that have not ended and the newest ended ones, then each that changes, named `operations/<id>`.

    None is ever deleted: the registry keeps them for days.
    """

    kind = "operation"
    access = _VIEW_OPERATIONS

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
    """Hosts with their devices, leases and waiters, by host name."""

    kind = "memory"
    access = _VIEW_OPERATIONS

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


MAX_ENDED = 1_000
"""Maximum ended requests in a reader's copy; the one that ended first is deleted first."""


class RequestsOfTenant(WatchSource):
    """The running requests of the caller's tenant and its latest ended ones, by id."""

    kind = "request"
    access = VIEW_REQUESTS

    def __init__(self, requests: RequestClient, max_ended: int = MAX_ENDED) -> None:
        self._requests = requests
        self._max_ended = max_ended

    @override
    async def changes(self, caller: WatchCaller) -> AsyncGenerator[Change]:
        ended = _EndedIds(self._max_ended)
        async with aclosing(self._requests.watch(caller.tenant, self._max_ended)) as responses:
            async for response in responses:
                for change in ended.changes(response):
                    yield change


class _EndedIds:
    """The ids of the ended requests in a reader's copy, to limit their number."""

    def __init__(self, max_ended: int) -> None:
        self._max_ended = max_ended
        self._ids: dict[str, None] = {}
        """In the order of their ends."""
        self._is_synced = False

    def changes(self, response: WatchRequestsResponse) -> Iterator[Change]:
        for record in response.requests:
            yield put_message(record.request_id, record)
            self._ids.pop(record.request_id, None)
            if record.state == RequestRecord.STATE_ENDED:
                self._ids[record.request_id] = None
        if response.synced:
            # Until then, the latest came first.
            self._ids = dict.fromkeys(reversed(self._ids))
            self._is_synced = True
            yield synced()
        while self._is_synced and len(self._ids) > self._max_ended:
            oldest = next(iter(self._ids))
            del self._ids[oldest]
            yield delete(oldest)


class FiguresOfMesh(WatchSource):
    """The figures of the last hour, then those of each step, named by the start of their first step.

    After as many steps as an hour has, the whole hour is sent again, to bound the reader's copy.
    """

    kind = "figures"
    access = _VIEW_TELEMETRY

    def __init__(self, requests: RequestClient, renewed_after: int = 360) -> None:
        """`renewed_after`: number of steps after which the hour is sent again, as a `reset`."""
        self._requests = requests
        self._renewed_after = renewed_after

    @override
    async def changes(self, caller: WatchCaller) -> AsyncGenerator[Change]:
        count: int | None = None
        async with aclosing(self._requests.watch_figures()) as steps:
            async for figures in steps:
                if count is None:
                    count = 0
                    yield _put_figures(figures)
                    yield synced()
                    continue
                count += figures.step_count
                if count < self._renewed_after:
                    yield _put_figures(figures)
                    continue
                count = 0
                yield Change(type=ChangeType.RESET)
                yield _put_figures(await self._requests.figures())
                yield synced()


def _put_figures(figures: Figures) -> Change:
    return put_message(figures.start_time.ToJsonString(), figures)


PAST_TASKS = 100


class TasksOfTenant(WatchSource):
    """The newest tasks of the caller's tenant, then each that is new or changes, by id."""

    kind = "task"
    access = VIEW_REQUESTS

    def __init__(self, tasks: TaskClient, task_apis: TaskApis) -> None:
        self._tasks = tasks
        self._task_apis = task_apis

    @override
    async def changes(self, caller: WatchCaller) -> AsyncGenerator[Change]:
        async with aclosing(self._tasks.watch_all(caller.tenant, PAST_TASKS)) as responses:
            async for response in responses:
                if response.HasField("task"):
                    yield put(response.task.id, partial(self._encoded, response.task))
                elif response.deleted_id:
                    yield delete(response.deleted_id)
                elif response.synced:
                    yield synced()

    def _encoded(self, task: Task) -> bytes:
        return encode_json(task_json(task, self._task_apis))
