"""The sources of a watch besides resources and queues: events, operations, memory, requests, figures and tasks."""

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import TypeVar

from gateway.operation_client import OperationsClient
from gateway.registry_client import RegistryClient
from gateway.tasks.task_apis import TaskApis
from gateway.tasks.task_handlers import task_json
from gateway.watch.source import Change, ChangeType, WatchCaller, WatchSource, delete, put, put_message, synced
from weft.api.operations.v1.operation_service_pb2 import WatchOperationsResponse
from weft.api.registry.v1.event_pb2 import Event
from weft.api.registry.v1.lease_service_pb2 import WatchHostMemoryResponse
from weft.api.router.v1.figures_pb2 import Figures
from weft.api.router.v1.request_pb2 import RequestRecord
from weft.api.router.v1.request_service_pb2 import WatchRequestsResponse
from weft.api.router.v1.task_service_pb2 import WatchTasksResponse
from weft.durable.requests import RequestClient
from weft.durable.tasks import TaskClient
from weft.kernel.access.principal import VIEW_REQUESTS, VIEW_TELEMETRY, Access, Resource, Role
from weft.kernel.text.json_lines import encode_json

R = TypeVar("R")

_VIEW_OPERATIONS = Access(Resource.OPERATIONS, Role.VIEW)
PAST_EVENTS = 100
PAST_OPERATIONS = 100
PAST_TASKS = 100


def _followed(
    kind: str,
    access: Access,
    follow: Callable[[WatchCaller], AsyncGenerator[R]],
    change_of: Callable[[R], Change | None],
) -> WatchSource:
    """Returns a source with one change, or none, for each response of a service's watch."""

    async def changes(caller: WatchCaller) -> AsyncGenerator[Change]:
        async with aclosing(follow(caller)) as responses:
            async for response in responses:
                change = change_of(response)
                if change is not None:
                    yield change

    return WatchSource(kind=kind, access=access, changes=changes)


def event_source(registry: RegistryClient) -> WatchSource:
    """The newest events, then every new one, named by sequence; none is ever deleted."""

    def change_of(event: Event | None) -> Change:
        return synced() if event is None else put_message(str(event.sequence), event)

    return _followed("event", VIEW_TELEMETRY, lambda _: registry.follow_events(PAST_EVENTS), change_of)


def operation_source(operations: OperationsClient) -> WatchSource:
    """Operations that have not ended and the newest ended ones, then each that changes, named `operations/<id>`.

    None is ever deleted: the registry keeps them for days.
    """

    def change_of(response: WatchOperationsResponse) -> Change | None:
        if response.HasField("operation"):
            return put_message(response.operation.name, response.operation)
        return synced() if response.synced else None

    return _followed("operation", _VIEW_OPERATIONS, lambda _: operations.watch_all(PAST_OPERATIONS), change_of)


def memory_source(operations: OperationsClient) -> WatchSource:
    """Hosts with their devices, leases and waiters, by host name."""

    def change_of(response: WatchHostMemoryResponse) -> Change | None:
        if response.HasField("host"):
            return put_message(response.host.host, response.host)
        if response.deleted_host:
            return delete(response.deleted_host)
        return synced() if response.synced else None

    return _followed("memory", _VIEW_OPERATIONS, lambda _: operations.watch_memory(), change_of)


def tasks_of_tenant(tasks: TaskClient, task_apis: TaskApis) -> WatchSource:
    """The newest tasks of the caller's tenant, then each that is new or changes, by id."""

    def change_of(response: WatchTasksResponse) -> Change | None:
        if response.HasField("task"):
            return put(response.task.id, lambda: encode_json(task_json(response.task, task_apis)))
        if response.deleted_id:
            return delete(response.deleted_id)
        return synced() if response.synced else None

    return _followed("task", VIEW_REQUESTS, lambda caller: tasks.watch_all(caller.tenant, PAST_TASKS), change_of)


MAX_ENDED = 1_000
"""Maximum ended requests in a reader's copy; the one that ended first is deleted first."""


def requests_of_tenant(requests: RequestClient, max_ended: int = MAX_ENDED) -> WatchSource:
    """The running requests of the caller's tenant and its latest ended ones, by id."""

    async def changes(caller: WatchCaller) -> AsyncGenerator[Change]:
        ended = _EndedIds(max_ended)
        async with aclosing(requests.watch(caller.tenant, max_ended)) as responses:
            async for response in responses:
                for change in ended.changes(response):
                    yield change

    return WatchSource(kind="request", access=VIEW_REQUESTS, changes=changes)


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


def figures_of_mesh(requests: RequestClient, renewed_after: int = 360) -> WatchSource:
    """The figures of the last hour, then those of each step, named by the start of their first step.

    After `renewed_after` steps, as many as an hour has, the whole hour is sent again as a `reset`, to bound the
    reader's copy.
    """

    async def changes(_caller: WatchCaller) -> AsyncGenerator[Change]:
        count: int | None = None
        async with aclosing(requests.watch_figures()) as steps:
            async for figures in steps:
                if count is None:
                    count = 0
                    yield _put_figures(figures)
                    yield synced()
                    continue
                count += figures.step_count
                if count < renewed_after:
                    yield _put_figures(figures)
                    continue
                count = 0
                yield Change(type=ChangeType.RESET)
                yield _put_figures(await requests.figures())
                yield synced()

    return WatchSource(kind="figures", access=VIEW_TELEMETRY, changes=changes)


def _put_figures(figures: Figures) -> Change:
    return put_message(figures.start_time.ToJsonString(), figures)
