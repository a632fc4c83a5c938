"""A task store in memory: a test sets the outcome of tasks, or completes all of them at once."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from gateway_script import Frame
from kit.messages import changed

from weft.api.common.v1 import embedding_pb2
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.durable.tasks import (
    DEFAULT_LISTED,
    TASK_PREFIX,
    TaskClient,
    event_number,
    is_terminal,
    task_error,
    task_not_found,
)
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.timestamps import stamp_of

BORN = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


def output(*frames: Frame, vectors: Sequence[Sequence[float]] = ()) -> task_pb2.TaskOutput:
    """A chunk with the events of some frames."""
    embeddings = [embedding_pb2.Embedding(index=index, values=values) for index, values in enumerate(vectors)]
    return task_pb2.TaskOutput(events=[event for frame in frames for event in frame], embeddings=embeddings)


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What was submitted."""

    tenant: str
    spec: task_pb2.TaskSpec
    idempotency_key: str
    caller: str
    request_id: str = ""


@dataclass
class Kept:
    """One task with its stored data."""

    new: Submission
    task: task_pb2.Task
    attempts: list[task_pb2.TaskAttempt] = field(default_factory=list)
    pieces: list[task_pb2.TaskPiece] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and changed by another event, after every change."""

    def change(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


@dataclass
class ScriptedTasks(TaskClient):
    """The tasks of a router. `at_once` completes each task with these outputs as it is submitted.

    `failure` is raised by every method, each of `watch_failures` by one watch, after the task's first state.
    """

    at_once: Sequence[task_pb2.TaskOutput] | None = None
    failure: WeftError | None = None
    watch_failures: list[WeftError] = field(default_factory=list)
    submit_gate: asyncio.Event | None = None
    """Where set: submissions wait for it."""
    kept: dict[str, Kept] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    watched_from: list[int] = field(default_factory=list)
    was_submitted: asyncio.Event = field(default_factory=asyncio.Event)
    was_watched: asyncio.Event = field(default_factory=asyncio.Event)
    was_cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    was_left: asyncio.Event = field(default_factory=asyncio.Event)
    """Whether a watch has ended."""
    notice: str = ""
    waiting_for: str = "no runner has the model"

    # Outcomes that a test sets.

    @property
    def one(self) -> Kept:
        (kept,) = self.kept.values()
        return kept

    def begin(self, task_id: str = "") -> None:
        """A router claims it."""
        kept = self._of(task_id)
        attempt = kept.task.attempt + 1
        kept.attempts.append(
            task_pb2.TaskAttempt(attempt=attempt, owner="r1", claim_time=stamp_of(BORN + timedelta(seconds=attempt)))
        )
        self._turn(
            kept, state=task_pb2.TASK_STATE_RUNNING, attempt=attempt, expire_time=None, waiting_for="", start_time=BORN
        )

    def say(self, piece: task_pb2.TaskOutput, task_id: str = "") -> None:
        """A chunk is stored."""
        kept = self._of(task_id)
        last = kept.pieces[-1].last_event if kept.pieces else event_number(kept.task.attempt, 0)
        number = last + len(piece.events)
        kept.pieces.append(task_pb2.TaskPiece(attempt=kept.task.attempt, last_event=number, output=piece))
        kept.task = changed(kept.task, last_event=number)
        kept.change()

    def lose(self, reason: Reason = Reason.WORKER_LOST, message: str = "the runner is gone", task_id: str = "") -> None:
        """Its attempt is lost; it waits for the next."""
        kept = self._of(task_id)
        kept.attempts[-1] = changed(kept.attempts[-1], reason=reason, message=message, end_time=BORN)
        kept.pieces.clear()
        self._turn(kept, state=task_pb2.TASK_STATE_PENDING, last_event=0, waiting_for=self.waiting_for)

    def complete(self, task_id: str = "") -> None:
        self._turn(self._of(task_id), state=task_pb2.TASK_STATE_COMPLETED, end_time=BORN + timedelta(minutes=1))

    def fail(self, reason: Reason, message: str, task_id: str = "") -> None:
        failure = task_error(reason, message)
        self._turn(self._of(task_id), state=task_pb2.TASK_STATE_FAILED, end_time=BORN, error=failure)

    def _of(self, task_id: str) -> Kept:
        return self.kept[task_id] if task_id else self.one

    def _turn(self, kept: Kept, **fields: object) -> None:
        kept.task = changed(kept.task, **fields)
        kept.change()

    # The port's methods.

    async def submit(
        self, tenant: str, request: task_service_pb2.SubmitTaskRequest, *, caller: str = "local"
    ) -> task_service_pb2.SubmitTaskResponse:
        new = Submission(
            tenant=tenant,
            spec=request.spec,
            idempotency_key=request.idempotency_key,
            caller=caller,
            request_id=request.request_id,
        )
        self._fail()
        if self.submit_gate is not None:
            self.was_submitted.set()
            await self.submit_gate.wait()
        for kept in self.kept.values():
            if new.idempotency_key and (kept.new.tenant, kept.new.idempotency_key) == (new.tenant, new.idempotency_key):
                if kept.new.spec != new.spec:
                    raise WeftError(Reason.IDEMPOTENCY_CONFLICT, "the key was used for something else")
                return task_service_pb2.SubmitTaskResponse(task=kept.task, existed=True)
        task = task_pb2.Task(
            id=f"{TASK_PREFIX}-{len(self.kept):024x}",
            tenant=new.tenant,
            state=task_pb2.TASK_STATE_PENDING,
            model=new.spec.model,
            create_time=stamp_of(BORN),
            expire_time=stamp_of(BORN + timedelta(hours=1)),
            max_attempts=new.spec.max_attempts or 5,
            waiting_for=self.waiting_for,
            origin_kind=new.spec.origin_kind,
            metadata=new.spec.metadata,
        )
        self.kept[task.id] = Kept(new, task)
        self.was_submitted.set()
        if self.at_once is not None:
            self.begin(task.id)
            for piece in self.at_once:
                self.say(piece, task.id)
            self.complete(task.id)
        return task_service_pb2.SubmitTaskResponse(task=task)

    async def get(self, tenant: str, task_id: str) -> task_pb2.Task:
        return self._kept(tenant, task_id).task

    async def details(self, tenant: str, task_id: str) -> task_service_pb2.GetTaskResponse:
        kept = self._kept(tenant, task_id)
        return task_service_pb2.GetTaskResponse(task=kept.task, spec=kept.new.spec, attempts=list(kept.attempts))

    async def list_page(
        self, tenant: str, query: task_service_pb2.ListTasksRequest
    ) -> task_service_pb2.ListTasksResponse:
        self._fail()
        if query.page_token and not query.page_token.isdigit():
            raise invalid_field("page_token", "is none of ours")
        found = [
            kept.task
            for kept in reversed(self.kept.values())
            if kept.task.tenant == tenant
            and (not query.states or kept.task.state in query.states)
            and (not query.model or kept.task.model == query.model)
            and (not query.origin_kind or kept.task.origin_kind == query.origin_kind)
        ]
        first = int(query.page_token or 0)
        last = first + (query.page_size or DEFAULT_LISTED)
        token = str(last) if len(found) > last else ""
        return task_service_pb2.ListTasksResponse(tasks=found[first:last], next_page_token=token, notice=self.notice)

    async def cancel(self, tenant: str, task_id: str) -> task_pb2.Task:
        kept = self._kept(tenant, task_id)
        if not is_terminal(kept.task):
            self._turn(kept, state=task_pb2.TASK_STATE_CANCELLED, end_time=BORN, expire_time=None)
            self.cancelled.append(task_id)
            self.was_cancelled.set()
        return kept.task

    async def delete(self, tenant: str, task_id: str) -> None:
        kept = self._kept(tenant, task_id)
        if not is_terminal(kept.task):
            raise WeftError(Reason.RESOURCE_IN_USE, f"task {task_id} is not at its end; cancel it first")
        del self.kept[task_id]

    async def watch(
        self, tenant: str, task_id: str, after_event: int = 0
    ) -> AsyncGenerator[task_service_pb2.WatchTaskResponse]:
        kept = self._kept(tenant, task_id)
        self.watched_from.append(after_event)
        task, told = kept.task, after_event
        try:
            yield task_service_pb2.WatchTaskResponse(task=task)
            self.was_watched.set()
            if self.watch_failures:
                raise self.watch_failures.pop(0)
            while True:
                changed = kept.changed
                if (kept.task.state, kept.task.attempt) != (
                    task.state,
                    task.attempt,
                ) and not is_terminal(kept.task):
                    task = kept.task
                    yield task_service_pb2.WatchTaskResponse(task=task)
                for piece in [piece for piece in kept.pieces if piece.last_event > told]:
                    told = piece.last_event
                    yield task_service_pb2.WatchTaskResponse(piece=piece)
                if is_terminal(kept.task):
                    yield task_service_pb2.WatchTaskResponse(task=kept.task)
                    return
                await changed.wait()
        finally:
            self.was_left.set()

    async def watch_all(self, tenant: str, past_count: int = 0) -> AsyncGenerator[task_service_pb2.WatchTasksResponse]:
        """The tasks there are, and then each that is submitted or removed."""
        self._fail()
        sent: dict[str, task_pb2.Task] = {}
        is_synced = False
        while True:
            now = {task_id: kept.task for task_id, kept in self.kept.items() if kept.task.tenant == tenant}
            for task in now.values():
                if sent.get(task.id) != task:
                    yield task_service_pb2.WatchTasksResponse(task=task)
            for task_id in sent.keys() - now.keys():
                yield task_service_pb2.WatchTasksResponse(deleted_id=task_id)
            if not is_synced:
                yield task_service_pb2.WatchTasksResponse(synced=True)
            sent, is_synced = now, True
            await asyncio.sleep(0.001)

    def _kept(self, tenant: str, task_id: str) -> Kept:
        self._fail()
        kept = self.kept.get(task_id)
        if kept is None or kept.task.tenant != tenant:
            raise task_not_found(task_id)
        return kept

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure
