"""The task service of a router: submit, read, list, cancel, delete and watch tasks.

Reads are monotonic: no answer of this router shows an older state of a task than its previous answers, even if a change
is committed and acknowledged between a read's snapshot and its answer. Routers that share a database do not guarantee
this across each other's answers.
"""

from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
from typing_extensions import override

from router_svc.call_metadata import id_in, metadata_of, tenant_in, tenant_of
from router_svc.durable.limits import MEBIBYTE
from router_svc.durable.tasks.failpoints import Failpoint
from router_svc.durable.tasks.spec_validation import MAX_CALLER_CHARS, checked_task, limit_to_caller
from router_svc.durable.tasks.sweeper import OpenTaskCounts
from router_svc.durable.tasks.task_engine import TaskEngine
from router_svc.durable.tasks.task_media import INPUTS, is_of_media
from router_svc.durable.tasks.task_records import ItemEnded, LaneFilled, NewTask, TaskChanged
from router_svc.durable.tasks.task_run import TaskDeps
from router_svc.durable.tasks.tenant_watch import TenantTaskWatcher
from weft.api.router.v1 import task_pb2, task_service_pb2_grpc
from weft.api.router.v1 import task_service_pb2 as pb
from weft.dispatch.agents import KnownNames
from weft.dispatch.aliases import name_asked_model
from weft.durable.tasks import (
    DEFAULT_LISTED,
    MAX_IDEMPOTENCY_KEY_CHARS,
    MAX_LISTED,
    TASK_STATES,
    attempt_of,
    copy_of,
    index_of,
    is_terminal,
    payload_of,
    task_not_found,
)
from weft.kernel.access.rpc_auth import caller
from weft.kernel.channels.rpc import AnsweringServicer, answering
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft.kernel.telemetry.structured_logs import TRACEPARENT, valid_traceparent
from weft.kernel.time.clock import wait_for_event
from weft.kernel.values.names import MAX_REQUEST_ID_CHARS, require_token

Context = grpc.aio.ServicerContext[Any, Any]

log = get_logger("weft.tasks")

MAX_READ_BYTES = MEBIBYTE
"""Maximum bytes of chunks per read."""
MAX_OF_REQUEST = 100
"""Maximum tasks examined for a request id."""
MAX_READINGS = 8
"""Maximum reads of details while newer states of the task are answered meanwhile."""
MAX_REMEMBERED = 10_000
"""Maximum tasks remembered while reads are in progress; the oldest is dropped first."""

_Key = tuple[str, str]
"""Tenant and task id: tasks are invisible to other tenants."""


class MonotonicReads:
    """Remembers each task's last answered state while an earlier read is unanswered."""

    def __init__(self) -> None:
        self._moment = 0
        self._readings: dict[int, None] = {}
        """Logical start times of reads in progress, oldest first."""
        self._shown: OrderedDict[_Key, tuple[int, task_pb2.Task | None]] = OrderedDict()
        """Answered states with logical times, oldest first; None: answered as not found."""

    @contextmanager
    def reading(self) -> Generator[None]:
        """Context of a read; the caller must not await between the end of the block and its answer."""
        began = self._next_moment()
        self._readings[began] = None
        try:
            yield
        finally:
            del self._readings[began]
            self._forget()

    def show(self, task: task_pb2.Task) -> task_pb2.Task | None:
        """Returns the state to answer: the given one, or a newer one that was answered meanwhile.

        None: the task was answered as not found meanwhile.
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

    def _remember(self, key: _Key, task: task_pb2.Task | None) -> None:
        self._shown[key] = (self._next_moment(), task)
        self._shown.move_to_end(key)
        if len(self._shown) > MAX_REMEMBERED:
            self._shown.popitem(last=False)

    def _forget(self) -> None:
        # Entries older than every read in progress can no longer be overtaken.
        oldest = next(iter(self._readings), self._moment)
        while self._shown:
            moment, _ = next(iter(self._shown.values()))
            if moment > oldest:
                return
            self._shown.popitem(last=False)

    def _next_moment(self) -> int:
        self._moment += 1
        return self._moment


def _progress(task: task_pb2.Task) -> tuple[bool, int, bool]:
    """Sort key of progress: after a reverted attempt, PENDING is later than RUNNING of the same attempt."""
    return is_terminal(task), task.attempt, task.state == task_pb2.TASK_STATE_PENDING


class TaskWatcher:
    """Streams committed states and chunks of tasks until each task is terminal."""

    def __init__(self, deps: TaskDeps, read: Callable[[str, str], Awaitable[task_pb2.Task]]) -> None:
        """`read` returns a tenant's task. Raises NOT_FOUND."""
        self._read = read
        self._store = deps.store
        self._events = deps.events
        self._clock = deps.database_clock.clock
        self._limits = deps.limits
        self._watches = 0

    async def watch(self, tenant: str, task_id: str, after_event: int) -> AsyncGenerator[pb.WatchTaskResponse]:
        """Yields events as specified by `TaskClient.watch`."""
        with self.counted(), self._events.watching(task_id) as event:
            shown: task_pb2.Task | None = None
            last = after_event
            while True:
                # Cleared before reading, so that an event during the read causes another one.
                event.clear()
                task = await self._read(tenant, task_id)
                if shown is None or (_has_moved(shown, task) and not is_terminal(task)):
                    yield pb.WatchTaskResponse(task=task)
                shown = task
                async for chunk in self._chunks(task, last):
                    last = chunk.last_event
                    yield pb.WatchTaskResponse(piece=chunk)
                if is_terminal(task):
                    if attempt_of(last) <= task.attempt and last < task.last_event:
                        # It was deleted while its answer was read, so the sent chunks are incomplete.
                        raise task_not_found(task_id)
                    yield pb.WatchTaskResponse(task=task)
                    return
                await wait_for_event(event, self._clock, self._limits.watch_poll_seconds)

    async def _chunks(self, task: task_pb2.Task, after_event: int) -> AsyncGenerator[task_pb2.TaskPiece]:
        """Yields the chunks after an event; an event of an earlier attempt counts as none."""
        index = index_of(after_event) if attempt_of(after_event) == task.attempt else 0
        while task.attempt:
            chunks = await self._store.chunks(task.id, task.attempt, index, MAX_READ_BYTES)
            if not chunks:
                return
            for chunk in chunks:
                yield chunk
            index = index_of(chunks[-1].last_event)

    @contextmanager
    def counted(self) -> Generator[None]:
        """Context of a watch. Raises TOO_MANY_RESOURCES at the limit."""
        if self._watches >= self._limits.max_watches:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                "the router has as many watchers of tasks as it may; poll the task instead",
                retry_after_seconds=self._limits.watch_poll_seconds,
            )
        self._watches += 1
        try:
            yield
        finally:
            self._watches -= 1


def _has_moved(before: task_pb2.Task, now: task_pb2.Task) -> bool:
    if (before.state, before.attempt) != (now.state, now.attempt):
        return True
    return now.HasField("progress") and before.progress != now.progress


_OF_NEW_TASKS = frozenset({Reason.TOO_MANY_RESOURCES, Reason.MODEL_NOT_FOUND, Reason.MODALITY_UNSUPPORTED})
"""Reasons that refuse only new tasks; a resubmission is answered with the stored task."""


class TaskServicer(AnsweringServicer, task_service_pb2_grpc.TaskServiceServicer):
    """TaskService of the router that runs the tasks, with monotonic reads."""

    def __init__(
        self, deps: TaskDeps, engine: TaskEngine, counts: OpenTaskCounts, names: KnownNames | None = None
    ) -> None:
        """`names`: models, routes and agents that tasks may use; None: any name is accepted, and ids are unknown."""
        self._deps = deps
        self._store = deps.store
        self._engine = engine
        self._counts = counts
        self._names = names
        self._shown = MonotonicReads()
        self._watcher = TaskWatcher(deps, self._get_described)
        clock, poll_seconds = deps.database_clock.clock, deps.limits.watch_poll_seconds
        self._tenants = TenantTaskWatcher(
            deps.events, self._page, self._get_described, clock, poll_seconds=poll_seconds
        )

    @override
    async def SubmitTask(self, request: pb.SubmitTaskRequest, context: Context) -> pb.SubmitTaskResponse:
        metadata, known, spec = metadata_of(context), caller(), request.spec
        tenant = tenant_of(metadata)
        if not known.names_tenants:
            spec.ClearField("asked_model")
        if self._names is not None:
            name_asked_model(self._names.view, spec, tenant)
        limit_to_caller(spec, known)
        # A resubmission with a key must have the same digest, so no trace is added.
        if not spec.traceparent and not request.idempotency_key:
            spec.traceparent = valid_traceparent(metadata.get(TRACEPARENT)) or ""
        if request.request_id:
            require_token(request.request_id, "request_id", MAX_REQUEST_ID_CHARS)
        return await self._submit(tenant, request, asking_caller(request.requested_by))

    async def _submit(self, tenant: str, request: pb.SubmitTaskRequest, asks: str) -> pb.SubmitTaskResponse:
        deps = self._deps
        new = checked_task(
            request.spec,
            deps.limits,
            "spec",
            tenant=tenant,
            caller=asks,
            created_at=deps.database_clock.now(),
            idempotency_key=request.idempotency_key,
        )
        if request.request_id:
            new.task.request_id = request.request_id
        _check_key(new.idempotency_key)
        try:
            if self._names is not None and not request.spec.wait_for_model:
                self._names.require(new.task.model, "spec.model")
                self._names.require_taken(new.task.model, payload_of(request.spec), "spec.model")
            await self._counts.require(tenant)
        except WeftError as error:
            # A resubmission adds nothing, and its sender may have lost the acknowledgement.
            known = None if error.reason not in _OF_NEW_TASKS else await self._submitted(self._store.submitted(new))
            if known is None:
                raise
            return known
        submitted = await self._stored(new, request)
        task = submitted.task
        await deps.failpoints.reach(Failpoint.SUBMITTED, task.id)
        if not submitted.existed:
            self._counts.add(tenant)
            log.info("task accepted", task=task.id, tenant=tenant, model=task.model, caller=asks)
            deps.events.publish(LaneFilled(new.lane))
            # Watchers of all tasks read only their newest page for a filled lane.
            deps.events.publish(TaskChanged(task.id))
        return submitted

    async def _stored(self, new: NewTask, request: pb.SubmitTaskRequest) -> pb.SubmitTaskResponse:
        """Stores a new task after its images and recordings, which are deleted if that fails."""
        media, tenant = self._deps.media, new.task.tenant
        if not is_of_media(payload_of(request.spec)):
            submitted = await self._submitted(self._store.submit(new))
            assert submitted is not None, "a submission is acknowledged or fails"
            return submitted
        known = None if not new.idempotency_key else await self._submitted(self._store.submitted(new))
        if known is not None:
            return known
        try:
            new = await media.accepted(new, request.spec, "spec")
            submitted = await self._submitted(self._store.submit(new))
        except WeftError as error:
            # A failing database may have stored the task; a sweep finds out.
            if error.reason is not Reason.SERVICE_UNAVAILABLE:
                await media.release(tenant, new.task.id, INPUTS)
            raise
        assert submitted is not None, "a submission is acknowledged or fails"
        if submitted.existed:
            await media.release(tenant, new.task.id, INPUTS)
        return submitted

    @override
    async def GetTask(self, request: pb.GetTaskRequest, context: Context) -> pb.GetTaskResponse:
        """Returns a task with details. Raises SERVICE_UNAVAILABLE if the task changes during every read."""
        tenant, task_id = tenant_in(context), id_in(request.id)
        for _ in range(MAX_READINGS):
            with self._shown.reading():
                found = await self._store.details(tenant, task_id)
                read = None if found is None else copy_of(found.task)
                # The attempts belong to the state read with them, so an overtaken pair is read again.
                if self._found(tenant, task_id, read) is read and found is not None and read is not None:
                    found.task.CopyFrom(self._described(read))
                    return found
        raise WeftError(
            Reason.SERVICE_UNAVAILABLE, f"task {task_id} changes faster than it can be read", retry_after_seconds=1
        )

    @override
    async def ListTasks(self, request: pb.ListTasksRequest, context: Context) -> pb.ListTasksResponse:
        return await self._page(tenant_in(context), request)

    async def _page(self, tenant: str, request: pb.ListTasksRequest) -> pb.ListTasksResponse:
        """Returns a page; a task that left the requested states meanwhile is omitted."""
        if not 1 <= (request.page_size or DEFAULT_LISTED) <= MAX_LISTED:
            raise invalid_field("page_size", f"must be 1 to {MAX_LISTED}")
        if any(state not in TASK_STATES for state in request.states):
            raise invalid_field("states", "must be states of tasks")
        with self._shown.reading():
            page = await self._store.list_page(tenant, request)
            newest = [self._shown.show(task) for task in page.tasks]
            states = request.states or TASK_STATES
            kept = [self._described(task) for task in newest if task is not None and task.state in states]
            return pb.ListTasksResponse(tasks=kept, next_page_token=page.next_page_token, notice=page.notice)

    async def open_of_request(self, request_id: str, tenant: str) -> Sequence[task_pb2.Task]:
        """Returns the unfinished tasks of journaled requests with this id, of one tenant or (empty) of any."""
        found = await self._store.open_of_request(request_id, MAX_OF_REQUEST)
        return [task for task in found if tenant in ("", task.tenant)]

    @override
    async def CancelTask(self, request: pb.CancelTaskRequest, context: Context) -> pb.CancelTaskResponse:
        return pb.CancelTaskResponse(task=await self.cancel(tenant_in(context), id_in(request.id)))

    async def cancel(self, tenant: str, task_id: str) -> task_pb2.Task:
        """Cancels a task; unchanged if it has ended. Raises NOT_FOUND."""
        before = await self._get(tenant, task_id)
        if is_terminal(before):
            return before
        await self._engine.cancel(lambda run: run.id == task_id)
        with self._shown.reading():
            ended, is_ended_here = await self._store.cancel(tenant, task_id, self._deps.database_clock.now())
            task = self._found(tenant, task_id, None if ended is None else copy_of(ended, owner=""))
        # Its run, or another call, may have ended it before, and logged that.
        if ended is not None and is_ended_here:
            owner = ended.owner or None
            log.info("task cancelled", task=task_id, attempt=task.attempt, owner=owner)
        self._engine.withdraw(task_id)
        self._deps.events.publish(TaskChanged(task_id))
        if task.batch:
            self._deps.events.publish(ItemEnded(task.batch))
        await self._deps.media.release(tenant, task_id, INPUTS)
        return task

    @override
    async def DeleteTask(self, request: pb.DeleteTaskRequest, context: Context) -> pb.DeleteTaskResponse:
        tenant, task_id = tenant_in(context), id_in(request.id)
        with self._shown.reading():
            self._found(tenant, task_id, await self._store.delete(tenant, task_id))
            self._shown.show_gone(tenant, task_id)
        self._deps.events.publish(TaskChanged(task_id))
        await self._deps.media.release_all(tenant, task_id)
        return pb.DeleteTaskResponse()

    @override
    async def WatchTask(self, request: pb.WatchTaskRequest, context: Context) -> AsyncGenerator[pb.WatchTaskResponse]:
        async with answering(context):
            if request.after_event < 0:
                raise invalid_field("after_event", "must not be negative")
            watched = self._watcher.watch(tenant_in(context), id_in(request.id), request.after_event)
            async with aclosing(watched) as events:
                async for each in events:
                    yield each

    @override
    async def WatchTasks(
        self, request: pb.WatchTasksRequest, context: Context
    ) -> AsyncGenerator[pb.WatchTasksResponse]:
        async with answering(context):
            if request.past_count < 0:
                raise invalid_field("past_count", "must not be negative")
            with self._watcher.counted():
                async with aclosing(self._tenants.watch(tenant_in(context), request.past_count)) as events:
                    async for each in events:
                        yield each

    async def _get_described(self, tenant: str, task_id: str) -> task_pb2.Task:
        return self._described(await self._get(tenant, task_id))

    async def _get(self, tenant: str, task_id: str) -> task_pb2.Task:
        with self._shown.reading():
            return self._found(tenant, task_id, await self._store.get(tenant, task_id))

    async def _submitted(self, answer: Awaitable[pb.SubmitTaskResponse | None]) -> pb.SubmitTaskResponse | None:
        with self._shown.reading():
            submitted = await answer
            if submitted is None:
                return None
            task = self._shown.show(submitted.task)
            if task is None:
                words = "the task of this idempotency key is just being deleted"
                raise WeftError(Reason.SERVICE_UNAVAILABLE, words, retry_after_seconds=1)
            return pb.SubmitTaskResponse(task=self._described(task), existed=submitted.existed)

    def _found(self, tenant: str, task_id: str, task: task_pb2.Task | None) -> task_pb2.Task:
        """Returns the newest answered state of a task. Raises NOT_FOUND."""
        newest = None if task is None else self._shown.show(task)
        if newest is None:
            self._shown.show_gone(tenant, task_id)
            raise task_not_found(task_id)
        return newest

    def _described(self, task: task_pb2.Task) -> task_pb2.Task:
        """Returns the task with its waiting reason or progress."""
        progress = self._engine.progress_of(task) if task.state == task_pb2.TASK_STATE_RUNNING else None
        if progress is not None:
            task = copy_of(task)
            task.progress.CopyFrom(progress)
            return task
        reason = self._waiting_reason(task)
        return copy_of(task, waiting_for=reason) if reason else task

    def _waiting_reason(self, task: task_pb2.Task) -> str:
        return self._engine.waiting_for(task) if task.state == task_pb2.TASK_STATE_PENDING else ""


def asking_caller(requested_by: str) -> str:
    """Returns the effective caller: whom the caller acts for, if allowed, else itself. Raises INVALID_ARGUMENT."""
    known = caller()
    asks = requested_by if known.names_tenants and requested_by else known.name
    if len(asks) > MAX_CALLER_CHARS or not asks.isprintable():
        raise invalid_field("requested_by", f"must have at most {MAX_CALLER_CHARS} printable characters")
    return asks


def _check_key(key: str) -> None:
    if len(key) > MAX_IDEMPOTENCY_KEY_CHARS or (key and not key.isprintable()):
        raise invalid_field("idempotency_key", f"must have at most {MAX_IDEMPOTENCY_KEY_CHARS} printable characters")
