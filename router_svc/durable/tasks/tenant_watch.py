"""The watch of all tasks of a tenant: the newest tasks, then every new or changed one.

Events are hints: the tasks that they contain are read and sent if they differ from what the watcher has. Frequent
events, such as for each piece of an answer, are merged.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from router_svc.durable.tasks.task_events import TaskEventBus
from router_svc.durable.tasks.task_records import (
    ItemEnded,
    StoreEvent,
    TaskChanged,
    TaskOffered,
    TaskPaused,
    TasksEnded,
    TasksPurged,
)
from weft.api.router.v1 import task_pb2
from weft.api.router.v1 import task_service_pb2 as pb
from weft.durable.tasks import DEFAULT_LISTED, MAX_LISTED, is_terminal
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import Clock, wait_for_event

MERGE_SECONDS = 0.25
"""Minimum time between two rounds of reads of a watcher, in which each task is read at most once."""
MAX_READS = 100
"""Maximum tasks read per round; the others follow in later rounds."""
MAX_CHANGED = 10_000
"""Maximum changed tasks of all tenants noted per watcher; above it, the newest page and all unfinished sent tasks
are read."""
MAX_HELD = 2 * MAX_LISTED
"""Maximum tasks compared with what was sent; for older ones every change is sent, but no deletion."""

ListPage = Callable[[str, pb.ListTasksRequest], Awaitable[pb.ListTasksResponse]]
ReadTask = Callable[[str, str], Awaitable[task_pb2.Task]]


class ChangedTasks:
    """Ids of changed tasks of all tenants since the last `take`."""

    def __init__(self, was_sent: Callable[[str], bool] = lambda _: True) -> None:
        """`was_sent`: whether the watcher has a task, as a sweep may purge many."""
        self._was_sent = was_sent
        self.event = asyncio.Event()
        self._ids: dict[str, None] = {}
        self._are_many = False

    def note(self, event: StoreEvent) -> None:
        """Notes an event of the bus."""
        if isinstance(event, ItemEnded | TaskOffered | TaskPaused | TasksEnded):
            return
        if isinstance(event, TasksPurged):
            for task_id in filter(self._was_sent, event.task_ids):
                self.note(TaskChanged(task_id))
            return
        if isinstance(event, TaskChanged) and len(self._ids) < MAX_CHANGED:
            self._ids[event.task_id] = None
        else:
            # Many changes, or new tasks, whose ids a filled lane does not contain.
            self._are_many = True
        self.event.set()

    def take(self, limit: int) -> tuple[list[str], bool]:
        """Returns and removes at most `limit` ids, and whether there may be changes without an id."""
        taken = list(self._ids)[:limit]
        for task_id in taken:
            del self._ids[task_id]
        many, self._are_many = self._are_many, False
        if not self._ids:
            self.event.clear()
        return taken, many


class TenantTaskWatcher:
    """Streams the tasks of tenants."""

    def __init__(
        self, events: TaskEventBus, list_page: ListPage, read: ReadTask, clock: Clock, *, poll_seconds: float
    ) -> None:
        """`read` raises NOT_FOUND. `poll_seconds`: interval of reads without an event, as one may have been lost."""
        self._events = events
        self._list_page = list_page
        self._read = read
        self._clock = clock
        self._poll_seconds = poll_seconds

    async def watch(self, tenant: str, past_count: int) -> AsyncGenerator[pb.WatchTasksResponse]:
        """Yields events as specified by `TaskClient.watch_all`."""
        sent = _SentTasks()
        changed = ChangedTasks(sent.has)
        newest = pb.ListTasksRequest(page_size=min(past_count or DEFAULT_LISTED, MAX_LISTED))
        with self._events.listening(changed.note):
            for task in reversed((await self._list_page(tenant, newest)).tasks):
                sent.is_news(task)
                yield pb.WatchTasksResponse(task=task)
            yield pb.WatchTasksResponse(synced=True)
            while True:
                is_event = await wait_for_event(changed.event, self._clock, self._poll_seconds)
                await self._clock.sleep(MERGE_SECONDS)
                ids, are_many = changed.take(MAX_READS)
                page = None if is_event and not are_many else newest
                async with aclosing(self._round(tenant, ids, sent, page)) as news:
                    async for each in news:
                        yield each

    async def _round(
        self, tenant: str, ids: list[str], sent: "_SentTasks", newest: pb.ListTasksRequest | None
    ) -> AsyncGenerator[pb.WatchTasksResponse]:
        """Reads tasks, with `newest` also that page and all unfinished sent tasks; yields the differences."""
        if newest is not None:
            for task in reversed((await self._list_page(tenant, newest)).tasks):
                if sent.is_news(task):
                    yield pb.WatchTasksResponse(task=task)
            ids = list(dict.fromkeys([*ids, *sent.unfinished()]))
        for task_id in ids:
            found = await self._found(tenant, task_id)
            if found is not None and sent.is_news(found):
                yield pb.WatchTasksResponse(task=found)
            elif found is None and sent.drop(task_id):
                yield pb.WatchTasksResponse(deleted_id=task_id)

    async def _found(self, tenant: str, task_id: str) -> task_pb2.Task | None:
        """Returns a task; None: it is deleted, or another tenant's."""
        try:
            return await self._read(tenant, task_id)
        except WeftError as error:
            if error.reason is not Reason.NOT_FOUND:
                raise
            return None


class _SentTasks:
    """The tasks as last sent, at most MAX_HELD."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[str, task_pb2.Task] = OrderedDict()

    def is_news(self, task: task_pb2.Task) -> bool:
        """Whether a task differs from what was sent; it then counts as sent."""
        known = self._tasks.pop(task.id, None)
        self._tasks[task.id] = task
        if len(self._tasks) > MAX_HELD:
            self._tasks.popitem(last=False)
        return known != task

    def has(self, task_id: str) -> bool:
        """Whether a task was sent."""
        return task_id in self._tasks

    def drop(self, task_id: str) -> bool:
        """Removes a task; returns whether it was sent."""
        return self._tasks.pop(task_id, None) is not None

    def unfinished(self) -> list[str]:
        """Returns the ids of sent tasks that can still change."""
        return [task.id for task in self._tasks.values() if not is_terminal(task)]
