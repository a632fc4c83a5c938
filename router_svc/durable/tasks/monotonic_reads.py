"""Tasks as submitters and watchers are answered: no answer of this router shows a task as it was before another one.

A reading takes a while between its snapshot and its answer. A change that is committed and acknowledged meanwhile would
otherwise be followed by the state before it. Routers that share a database keep this each for itself.
"""

from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

from router_svc.durable.tasks.store_port import TaskRow, TaskStore
from weft.durable.tasks import (
    Submitted,
    Task,
    TaskDetails,
    TaskPage,
    TaskQuery,
    TaskState,
    task_being_deleted,
    task_not_found,
)
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

MAX_REMEMBERED = 10_000
"""Tasks that are remembered while readings are under way; beyond that the oldest is forgotten."""

_Key = tuple[str, str]
"""Tenant and id: to another tenant a task does not exist, which says nothing of it."""


class MonotonicReads:
    """Remembers what is shown for as long as a reading that began before is not answered."""

    def __init__(self) -> None:
        self._moment = 0
        self._readings: dict[int, None] = {}
        """The moments at which readings under way began, oldest first."""
        self._shown: OrderedDict[_Key, tuple[int, Task | None]] = OrderedDict()
        """With the moment of each, oldest first; None instead of a task: it is gone."""

    @contextmanager
    def reading(self) -> Generator[None]:
        """A block that reads, shows what it has read, and awaits nothing between its last line and its answer."""
        began = self._next_moment()
        self._readings[began] = None
        try:
            yield
        finally:
            del self._readings[began]
            self._forget()

    def show(self, task: Task) -> Task | None:
        """What is to be answered for a task that was read: the task, or what was shown meanwhile and is newer.

        None: an answer said meanwhile that it does not exist.
        """
        key = (task.tenant, task.id)
        if key in self._shown:
            known = self._shown[key][1]
            if known is None or _progress(known) > _progress(task):
                return known
        self._remember(key, task)
        return task

    def show_gone(self, tenant: str, task_id: str) -> None:
        """The answer is that the tenant has no such task."""
        self._remember((tenant, task_id), None)

    def _remember(self, key: _Key, task: Task | None) -> None:
        self._shown[key] = (self._next_moment(), task)
        self._shown.move_to_end(key)
        if len(self._shown) > MAX_REMEMBERED:
            self._shown.popitem(last=False)

    def _forget(self) -> None:
        """Drop what every reading under way began after."""
        oldest = next(iter(self._readings), self._moment)
        while self._shown:
            moment, _ = next(iter(self._shown.values()))
            if moment > oldest:
                return
            self._shown.popitem(last=False)

    def _next_moment(self) -> int:
        self._moment += 1
        return self._moment


def _progress(task: Task) -> tuple[bool, int, bool]:
    """How far a task has come: an attempt that was given up is PENDING again, and later than while it ran."""
    return task.state.is_terminal, task.attempt, task.state is TaskState.PENDING


MAX_READINGS = 8
"""So often details are read anew that were overtaken: each time a later state of this one task was shown meanwhile."""


class MonotonicTasks:
    """What a store says, in an order that never goes back. Methods as in TaskStore, with NOT_FOUND raised."""

    def __init__(self, store: TaskStore) -> None:
        self._store = store
        self._shown = MonotonicReads()

    async def submit(self, row: TaskRow) -> Submitted:
        """See TaskStore.submit."""
        with self._shown.reading():
            return self._submitted(await self._store.submit(row))

    async def submitted(self, row: TaskRow) -> Submitted | None:
        """See TaskStore.submitted."""
        with self._shown.reading():
            found = await self._store.submitted(row)
            return None if found is None else self._submitted(found)

    async def get(self, tenant: str, task_id: str) -> Task:
        """See TaskStore.get."""
        with self._shown.reading():
            return self._found(tenant, task_id, await self._store.get(tenant, task_id))

    async def details(self, tenant: str, task_id: str) -> TaskDetails:
        """See TaskStore.details. Raises SERVICE_UNAVAILABLE where the task changes each time that it is read."""
        for _ in range(MAX_READINGS):
            with self._shown.reading():
                found = await self._store.details(tenant, task_id)
                task = self._found(tenant, task_id, None if found is None else found.task)
                # The attempts belong to the task as it was read: both are of one moment, or are read again.
                if found is not None and task is found.task:
                    return found
        raise WeftError(
            Reason.SERVICE_UNAVAILABLE, f"task {task_id} changes faster than it can be read", retry_after_seconds=1
        )

    async def list_page(self, tenant: str, query: TaskQuery) -> TaskPage:
        """See TaskStore.list_page. A task that has left the asked states meanwhile is left out."""
        with self._shown.reading():
            page = await self._store.list_page(tenant, query)
            newest = [self._shown.show(task) for task in page.tasks]
            kept = [task for task in newest if task is not None and (not query.states or task.state in query.states)]
            return replace(page, tasks=kept)

    async def cancel(self, tenant: str, task_id: str, now: float) -> Task:
        """See TaskStore.cancel."""
        with self._shown.reading():
            ended = await self._store.cancel(tenant, task_id, now)
            task = self._found(tenant, task_id, None if ended is None else replace(ended, owner=""))
            return task if ended is None else replace(task, owner=ended.owner)

    async def delete(self, tenant: str, task_id: str) -> None:
        """See TaskStore.delete."""
        with self._shown.reading():
            self._found(tenant, task_id, await self._store.delete(tenant, task_id))
            self._shown.show_gone(tenant, task_id)

    def _submitted(self, submitted: Submitted) -> Submitted:
        task = self._shown.show(submitted.task)
        if task is None:
            raise task_being_deleted()
        return replace(submitted, task=task)

    def _found(self, tenant: str, task_id: str, task: Task | None) -> Task:
        newest = None if task is None else self._shown.show(task)
        if newest is None:
            self._shown.show_gone(tenant, task_id)
            raise task_not_found(task_id)
        return newest
