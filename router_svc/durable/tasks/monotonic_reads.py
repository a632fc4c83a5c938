"""Monotonic reads: no answer of this router shows an older state of a task than an answer that it gave before.

Time passes between the snapshot that a read takes and its answer. Without this module a change that is committed and
acknowledged in between would be followed by an answer with the state before it. Each router guarantees this for its own
answers only, not across routers that share a database.
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
"""Tasks that are remembered while reads are in progress; beyond that the oldest is dropped."""

_Key = tuple[str, str]
"""Tenant and task id: a task does not exist for other tenants, which says nothing about its own."""


class MonotonicReads:
    """Remembers the last answered state of each task while an earlier read is unanswered."""

    def __init__(self) -> None:
        self._moment = 0
        self._readings: dict[int, None] = {}
        """Logical times at which the reads in progress began, oldest first."""
        self._shown: OrderedDict[_Key, tuple[int, Task | None]] = OrderedDict()
        """Answered states with their logical times, oldest first; None: the task was answered as not found."""

    @contextmanager
    def reading(self) -> Generator[None]:
        """Context of one read; the caller must not await between the end of the block and its answer."""
        began = self._next_moment()
        self._readings[began] = None
        try:
            yield
        finally:
            del self._readings[began]
            self._forget()

    def show(self, task: Task) -> Task | None:
        """Returns the state to answer: the given one, or a newer one that another answer has shown meanwhile.

        None: another answer has said meanwhile that the task does not exist.
        """
        key = (task.tenant, task.id)
        if key in self._shown:
            known = self._shown[key][1]
            if known is None or _progress(known) > _progress(task):
                return known
        self._remember(key, task)
        return task

    def show_gone(self, tenant: str, task_id: str) -> None:
        """Records that the answer is NOT_FOUND."""
        self._remember((tenant, task_id), None)

    def _remember(self, key: _Key, task: Task | None) -> None:
        self._shown[key] = (self._next_moment(), task)
        self._shown.move_to_end(key)
        if len(self._shown) > MAX_REMEMBERED:
            self._shown.popitem(last=False)

    def _forget(self) -> None:
        # Entries older than every read in progress cannot be overtaken any more.
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
    """Sort key of progress: a reverted attempt is PENDING again, which is later than RUNNING of the same attempt."""
    return task.state.is_terminal, task.attempt, task.state is TaskState.PENDING


MAX_READINGS = 8
"""How often details are read again when a newer state of the task was answered meanwhile."""


class MonotonicTasks:
    """The task store as submitters see it, with monotonic reads. Methods as in TaskStore, but NOT_FOUND is raised."""

    def __init__(self, store: TaskStore) -> None:
        self._store = store
        self._shown = MonotonicReads()

    async def submit(self, row: TaskRow) -> Submitted:
        """Stores a new task; see `TaskStore.submit`."""
        with self._shown.reading():
            return self._submitted(await self._store.submit(row))

    async def submitted(self, row: TaskRow) -> Submitted | None:
        """Returns the task that has the idempotency key of `row`; None: there is none."""
        with self._shown.reading():
            found = await self._store.submitted(row)
            return None if found is None else self._submitted(found)

    async def get(self, tenant: str, task_id: str) -> Task:
        """Returns a task."""
        with self._shown.reading():
            return self._found(tenant, task_id, await self._store.get(tenant, task_id))

    async def details(self, tenant: str, task_id: str) -> TaskDetails:
        """Returns the task with its spec and attempts; raises SERVICE_UNAVAILABLE if it changes during every read."""
        for _ in range(MAX_READINGS):
            with self._shown.reading():
                found = await self._store.details(tenant, task_id)
                task = self._found(tenant, task_id, None if found is None else found.task)
                # The attempts belong to the state that was read with them: an overtaken pair is read again.
                if found is not None and task is found.task:
                    return found
        raise WeftError(
            Reason.SERVICE_UNAVAILABLE, f"task {task_id} changes faster than it can be read", retry_after_seconds=1
        )

    async def list_page(self, tenant: str, query: TaskQuery) -> TaskPage:
        """Returns a page; a task that has left the requested states meanwhile is omitted."""
        with self._shown.reading():
            page = await self._store.list_page(tenant, query)
            newest = [self._shown.show(task) for task in page.tasks]
            kept = [task for task in newest if task is not None and (not query.states or task.state in query.states)]
            return replace(page, tasks=kept)

    async def cancel(self, tenant: str, task_id: str, now: float) -> Task:
        """Cancels a task unless it is terminal; `owner` of the result names the router that ran it."""
        with self._shown.reading():
            ended = await self._store.cancel(tenant, task_id, now)
            task = self._found(tenant, task_id, None if ended is None else replace(ended, owner=""))
            return task if ended is None else replace(task, owner=ended.owner)

    async def delete(self, tenant: str, task_id: str) -> None:
        """Deletes a terminal task."""
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
