"""The task port inside the router's own process: submit, read, list, cancel, delete and watch tasks.

Its reads are monotonic: no answer of this router shows an older state of a task than an answer that it gave before.
Time passes between the snapshot that a read takes and its answer; a change that is committed and acknowledged in
between would otherwise be followed by an answer with the state before it. Each router guarantees this for its own
answers only, not across routers that share a database.
"""

from collections import OrderedDict
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace

from typing_extensions import override

from router_svc.durable.limits import MEBIBYTE, TaskLimits
from router_svc.durable.tasks.failpoints import Failpoint, Failpoints
from router_svc.durable.tasks.spec_validation import CheckedSpec, check_spec
from router_svc.durable.tasks.store_port import (
    DatabaseClock,
    Lane,
    LaneFilled,
    TaskChanged,
    TaskReads,
    TaskRow,
    TaskStore,
)
from router_svc.durable.tasks.sweeper import OpenTaskCounts
from router_svc.durable.tasks.task_engine import TaskEngine
from router_svc.durable.tasks.task_events import TaskEventBus, wait_for_event
from weft.dispatch.agents import KnownNames
from weft.durable.tasks import (
    MAX_IDEMPOTENCY_KEY_CHARS,
    MAX_LISTED,
    TASK_PREFIX,
    NewTask,
    Submitted,
    Task,
    TaskChunk,
    TaskDetails,
    TaskEvent,
    TaskPage,
    TaskPort,
    TaskQuery,
    TaskState,
    attempt_of,
    index_of,
    task_being_deleted,
    task_not_found,
)
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.log import get_logger
from weft.kernel.names import new_id
from weft.kernel.reasons import Reason

log = get_logger("weft.tasks")

MAX_READ_BYTES = MEBIBYTE
"""Bytes of chunks that one read returns."""
MAX_READINGS = 8
"""How often details are read again when a newer state of the task was answered meanwhile."""
MAX_REMEMBERED = 10_000
"""Tasks that are remembered while reads are in progress; beyond that the oldest is dropped."""

_Key = tuple[str, str]
"""Tenant and task id: a task does not exist for other tenants, independently of its own."""


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


class TaskWatcher:
    """Streams committed states and chunks of tasks to callers until each task is terminal."""

    def __init__(
        self, answers: MonotonicTasks, store: TaskReads, events: TaskEventBus, clock: Clock, limits: TaskLimits
    ) -> None:
        self._answers = answers
        self._store = store
        self._events = events
        self._clock = clock
        self._limits = limits
        self._watches = 0

    async def watch(self, tenant: str, task_id: str, after_event: int) -> AsyncGenerator[TaskEvent]:
        """Yields what `TaskPort.watch` promises."""
        with self._counted(), self._events.watching(task_id) as event:
            shown: Task | None = None
            last = after_event
            while True:
                # Cleared before reading: an event that comes during the read causes another one.
                event.clear()
                task = await self._answers.get(tenant, task_id)
                if shown is None or (_has_moved(shown, task) and not task.state.is_terminal):
                    yield task
                shown = task
                async for chunk in self._chunks(task, last):
                    last = chunk.last_event
                    yield chunk
                if task.state.is_terminal:
                    if attempt_of(last) <= task.attempt and last < task.last_event:
                        # It was deleted while its answer was read: the chunks that were sent are not all of it.
                        raise task_not_found(task_id)
                    yield task
                    return
                await wait_for_event(event, self._clock, self._limits.watch_poll_seconds)

    async def _chunks(self, task: Task, after_event: int) -> AsyncGenerator[TaskChunk]:
        """Yields the chunks after an event; an event of an earlier attempt counts as no event."""
        index = index_of(after_event) if attempt_of(after_event) == task.attempt else 0
        while task.attempt:
            chunks = await self._store.chunks(task.id, task.attempt, index, MAX_READ_BYTES)
            if not chunks:
                return
            for chunk in chunks:
                yield chunk
            index = index_of(chunks[-1].last_event)

    @contextmanager
    def _counted(self) -> Generator[None]:
        if self._watches >= self._limits.max_watches:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                "the router has as many watchers of tasks as it may (router.tasks.max_watches); poll the task instead",
                retry_after_seconds=self._limits.watch_poll_seconds,
            )
        self._watches += 1
        try:
            yield
        finally:
            self._watches -= 1


def _has_moved(before: Task, now: Task) -> bool:
    return (before.state, before.attempt) != (now.state, now.attempt)


_OF_NEW_TASKS = frozenset({Reason.TOO_MANY_RESOURCES, Reason.MODEL_NOT_FOUND})
"""Reasons that refuse new tasks only; a resubmission of a stored task is answered with that task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTasksDeps:
    """What `LocalTasks` works with."""

    answers: MonotonicTasks
    events: TaskEventBus
    engine: TaskEngine
    counts: OpenTaskCounts
    watcher: TaskWatcher
    database_clock: DatabaseClock
    limits: TaskLimits
    failpoints: Failpoints
    names: KnownNames | None = None
    """Models, routes and agents that tasks may name; None: any name is accepted."""


class LocalTasks(TaskPort):
    """The TaskPort of the router that runs the tasks."""

    def __init__(self, deps: LocalTasksDeps) -> None:
        self._deps = deps

    @override
    async def submit(self, new: NewTask) -> Submitted:
        deps = self._deps
        checked = check_spec(new.spec, deps.limits, "spec")
        row = _row_of(new, checked, deps.database_clock.now())
        try:
            if deps.names is not None and not new.spec.wait_for_model:
                deps.names.require(checked.model, "spec.model")
            await deps.counts.require(new.tenant)
        except WeftError as error:
            # A resubmission adds nothing, and its sender may have lost the acknowledgement.
            known = None if error.reason not in _OF_NEW_TASKS else await deps.answers.submitted(row)
            if known is None:
                raise
            return replace(known, task=self._with_waiting_reason(known.task))
        submitted = await deps.answers.submit(row)
        task = submitted.task
        await deps.failpoints.reach(Failpoint.SUBMITTED, task.id)
        if not submitted.existed:
            deps.counts.add(new.tenant)
            log.info("task accepted", task=task.id, tenant=new.tenant, model=task.model, caller=new.caller)
            deps.events.publish(LaneFilled(row.lane))
        return replace(submitted, task=self._with_waiting_reason(task))

    @override
    async def get(self, tenant: str, task_id: str) -> Task:
        return self._with_waiting_reason(await self._deps.answers.get(tenant, task_id))

    @override
    async def details(self, tenant: str, task_id: str) -> TaskDetails:
        found = await self._deps.answers.details(tenant, task_id)
        return replace(found, task=self._with_waiting_reason(found.task))

    @override
    async def list_page(self, tenant: str, query: TaskQuery) -> TaskPage:
        if not 1 <= query.page_size <= MAX_LISTED:
            raise invalid_field("page_size", f"must be 1 to {MAX_LISTED}")
        page = await self._deps.answers.list_page(tenant, query)
        return replace(page, tasks=[self._with_waiting_reason(task) for task in page.tasks])

    @override
    async def cancel(self, tenant: str, task_id: str) -> Task:
        deps = self._deps
        before = await deps.answers.get(tenant, task_id)
        if before.state.is_terminal:
            return self._with_waiting_reason(before)
        found = await deps.answers.cancel(tenant, task_id, deps.database_clock.now())
        if found.state is TaskState.CANCELLED:
            log.info("task cancelled", task=task_id, attempt=found.attempt, owner=found.owner or None)
        deps.engine.withdraw(task_id)
        deps.events.publish(TaskChanged(task_id))
        return replace(found, owner="")

    @override
    async def delete(self, tenant: str, task_id: str) -> None:
        await self._deps.answers.delete(tenant, task_id)
        self._deps.events.publish(TaskChanged(task_id))

    @override
    async def watch(self, tenant: str, task_id: str, after_event: int = 0) -> AsyncGenerator[TaskEvent]:
        async with aclosing(self._deps.watcher.watch(tenant, task_id, after_event)) as watched:
            async for event in watched:
                yield self._with_waiting_reason(event) if isinstance(event, Task) else event

    def _with_waiting_reason(self, task: Task) -> Task:
        """Adds the reason why a pending task waits, as far as this router knows it."""
        if task.state is not TaskState.PENDING:
            return task
        return replace(task, waiting_for=self._deps.engine.waiting_for(task))


def _row_of(new: NewTask, checked: CheckedSpec, now: float) -> TaskRow:
    key = new.idempotency_key
    if len(key) > MAX_IDEMPOTENCY_KEY_CHARS or (key and not key.isprintable()):
        raise invalid_field("idempotency_key", f"must have at most {MAX_IDEMPOTENCY_KEY_CHARS} printable characters")
    return TaskRow(
        id=new_id(TASK_PREFIX),
        lane=Lane(checked.model, new.tenant, checked.band),
        idempotency_key=key,
        digest=checked.digest,
        spec=checked.spec,
        origin_kind=checked.origin_kind,
        caller=new.caller,
        max_attempts=checked.max_attempts,
        pending_limit_seconds=checked.pending_limit_seconds,
        created_at=now,
    )
