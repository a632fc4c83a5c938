"""A run of a task: offer, claim, call, recorded output, and the end or revert of the attempt."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from router_svc.durable.limits import TaskLimits
from router_svc.durable.tasks.failpoints import Failpoint, Failpoints
from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.task_call import CallMaker, ClaimMissedError, TaskCall
from router_svc.durable.tasks.task_events import TaskEventBus
from router_svc.durable.tasks.task_media import (
    FIRST_WRITE_PAUSE_SECONDS,
    MAX_WRITE_PAUSE_SECONDS,
    WRITE_PATIENCE_SECONDS,
    MediaRecorder,
    ResultsFullError,
    TaskMedia,
)
from router_svc.durable.tasks.task_records import (
    DatabaseClock,
    ItemEnded,
    LaneFilled,
    NewChunk,
    PendingTask,
    StoreEvent,
    TaskChanged,
    TaskLease,
    TaskOffered,
    TaskOutcome,
    TaskPaused,
)
from router_svc.durable.tasks.task_spans import TaskSpans
from router_svc.policy.task_retry import (
    GivesUp,
    TryAgain,
    after_failed_attempt,
    after_refused_offer,
)
from weft.api.common.v1 import event_pb2
from weft.api.router.v1 import task_pb2
from weft.dispatch.frames import has_content
from weft.dispatch.placement import canceller_of
from weft.durable.tasks import state_name, task_error
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason, reason_of
from weft.kernel.services.service_lifecycle import start_task
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import stamp_of

PROGRESS_INTERVAL_SECONDS = 0.25
"""Interval of progress reports to watchers of an image or recording; progress is not stored."""
WATCHED_PIECE_INTERVAL_SECONDS = 0.05
"""Interval of output writes to the database while a caller watches the task."""


class OutputRecorder:
    """Collects the output of an attempt and writes it in chunks; the runner waits during a write."""

    def __init__(
        self,
        limits: TaskLimits,
        clock: Clock,
        is_watched: Callable[[], bool],
        write: Callable[[Sequence[NewChunk]], Awaitable[None]],
    ) -> None:
        """`write` returns once the chunks are on disk; it raises if they cannot be stored."""
        self._limits = limits
        self._clock = clock
        self._is_watched = is_watched
        self._write_chunks = write
        self._lock = asyncio.Lock()
        self._unwritten: list[event_pb2.InferenceEvent] = []
        self._embeddings: task_pb2.TaskOutput | None = None
        self._unwritten_bytes = 0
        self._written = 0
        self._bytes = 0
        """Total bytes of output."""
        self._has_content = False
        self._is_finished = False
        self._has_more = asyncio.Event()

    async def add(self, output: task_pb2.TaskOutput) -> None:
        """Adds the runner's output to store. Raises REQUEST_TOO_LARGE for an answer above `max_result_bytes`."""
        async with self._lock:
            kept = list(output.events)
            if not kept:
                return
            self._take(kept, output)
            is_first = not self._has_content and has_content(kept)
            self._has_content = self._has_content or is_first
            # The last events are committed together with the terminal state.
            if kept[-1].WhichOneof("event") == "finished":
                self._is_finished = True
                return
            if self._unwritten_bytes >= self._limits.max_piece_bytes or (is_first and self._is_watched()):
                await self._write()
            else:
                self._has_more.set()

    async def keep_writing(self) -> None:
        """Writes collected output periodically, until cancelled, so that a pausing runner does not delay it."""
        while True:
            await self._has_more.wait()
            watched, usual = self._is_watched(), self._limits.piece_interval_seconds
            await self._clock.sleep(WATCHED_PIECE_INTERVAL_SECONDS if watched else usual)
            async with self._lock:
                self._has_more.clear()
                if not self._is_finished:
                    await self._write()

    async def rest(self) -> Sequence[NewChunk]:
        """Returns the unwritten chunks once no write is in progress."""
        async with self._lock:
            self._has_more.clear()
            return self._chunks()

    def _take(self, events: list[event_pb2.InferenceEvent], output: task_pb2.TaskOutput) -> None:
        size = output.ByteSize()
        self._bytes += size
        limit = self._limits.max_result_bytes
        if self._bytes > limit:
            raise WeftError(
                Reason.REQUEST_TOO_LARGE,
                f"the answer has more than {limit} bytes; ask for less in one task",
            )
        self._unwritten += events
        self._unwritten_bytes += size
        if output.embeddings:
            self._embeddings = output

    async def _write(self) -> None:
        chunks = self._chunks()
        if not chunks:
            return
        await self._write_chunks(chunks)
        self._written += len(self._unwritten)
        self._unwritten.clear()
        self._unwritten_bytes = 0

    def _chunks(self) -> list[NewChunk]:
        """Returns unwritten events in chunks of at most `max_piece_bytes`; an event is never split."""
        if self._embeddings is not None:
            return [NewChunk(first_index=1, event_count=1, output=self._embeddings.SerializeToString())]
        chunks: list[NewChunk] = []
        first = 0
        size = 0
        for index, event in enumerate(self._unwritten):
            length = event.ByteSize()
            if index > first and size + length > self._limits.max_piece_bytes:
                chunks.append(self._chunk(first, index))
                first, size = index, 0
            size += length
        if first < len(self._unwritten):
            chunks.append(self._chunk(first, len(self._unwritten)))
        return chunks

    def _chunk(self, first: int, end: int) -> NewChunk:
        return NewChunk(
            first_index=self._written + first + 1,
            event_count=end - first,
            output=task_pb2.TaskOutput(events=self._unwritten[first:end]).SerializeToString(),
        )


log = get_logger("weft.tasks")


class StopReason(Enum):
    """Why a run is stopped externally."""

    LOST = "lost"
    CANCELLED = "cancelled"
    """The task was ended elsewhere."""
    TIMED_OUT = "timed out"
    """The attempt exceeded `run_timeout_seconds`."""
    WITHDRAWN = "withdrawn"
    """The task is cancelled, and this run ends it."""
    HALTED = "halted"
    """The router shuts down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDeps:
    """Dependencies of a router's tasks."""

    owner: str
    """Id of this router process, which owns its claims."""
    store: SqlTaskStore
    events: TaskEventBus
    database_clock: DatabaseClock
    limits: TaskLimits
    calls: CallMaker
    failpoints: Failpoints
    spans: TaskSpans
    media: TaskMedia


class RunHost(Protocol):
    """The engine that runs a task."""

    def admit(self, run: "TaskRun") -> bool:
        """Returns whether another attempt may run, and counts it if so."""
        ...

    def publish(self, event: StoreEvent) -> None:
        """Publishes a committed change of a task that runs here."""
        ...

    def note_claimed(self, run: "TaskRun") -> None:
        """Called after the claim, when another task can be offered."""
        ...


class TaskRun:
    """A task: offered until a slot is granted, then claimed and run to the end of the attempt."""

    def __init__(self, deps: TaskDeps, host: RunHost, task: PendingTask) -> None:
        self._deps = deps
        self._host = host
        self.task = task
        self.claim: TaskLease | None = None
        """The attempt's claim; None: the task is only offered."""
        self.is_claiming = False
        self.is_over_capacity = False
        """Whether the task was not claimed because `max_running` attempts run."""
        self.waiting_reason = ""
        """Why the task waits, from the scheduler's last status message."""
        self.refusal: WeftError | None = None
        """Why the offer was refused; None: it was not, or the task is no longer pending."""
        self.is_unwritten = False
        """Whether the offer failed because the database refused the claim."""
        self.ready_at: float | None = None
        """When the task may be retried after a failed attempt."""
        self._was_taken = False
        """Whether a runner has sent any output since the claim."""
        self.progress: event_pb2.WorkProgress | None = None
        """The attempt's progress on an image or recording; None: unknown."""
        self._has_progressed = asyncio.Event()
        self._media = MediaRecorder(deps.media, task.lane.tenant, deps.database_clock.clock)
        self._ended: int | None = None
        """The final state that this run wrote; None: none."""
        self._stop: StopReason | None = None
        self._call: TaskCall | None = None
        self._reading: asyncio.Task[None] | None = None
        self._helpers: list[asyncio.Task[None]] = []
        self._recording = OutputRecorder(
            deps.limits, deps.database_clock.clock, lambda: deps.events.is_watched(task.id), self._append
        )

    @property
    def is_running(self) -> bool:
        """Whether the task is claimed."""
        return self.claim is not None

    @property
    def is_stopped(self) -> bool:
        """Whether the run was stopped externally."""
        return self._stop is not None

    def stop(self, reason: StopReason) -> None:
        """Withdraws the offer, or cancels the call. Only the first reason counts."""
        self._stop = self._stop or reason
        # A claim in progress is awaited, as the run must know whether it is on disk.
        if self._reading is not None and not self.is_claiming:
            self._reading.cancel()

    async def go(self) -> None:
        """Offers the task, runs it, and writes the result of the attempt."""
        if self._stop is not None:
            return
        self._host.publish(TaskOffered(self.task))
        self._reading = asyncio.create_task(self._read(), name=f"task-call-{self.task.id}")
        try:
            await asyncio.wait([self._reading])
            error = _error_of(self._reading, self._stop)
            if self.claim is None and error is not None:
                await self._note_refusal(error)
            if self.claim is not None:
                await self._conclude(self.claim, error)
        finally:
            self._reading.cancel()
            for helper in self._helpers:
                helper.cancel()

    # -- before the claim

    async def _read(self) -> None:
        self._call = self._deps.calls.make(self.task, self._take)
        async with aclosing(self._call.outputs()) as outputs:
            async for output in outputs:
                if self.claim is None:
                    self.waiting_reason = _waiting_reason_of(output) or self.waiting_reason
                else:
                    self._was_taken = True
                    self._note_progress(output)
                    await self._recording.add(await self._media.kept(self.claim, output))
        if self.claim is None:
            raise WeftError(Reason.INTERNAL, "the request ended before it was placed")

    async def _take(self) -> None:
        """Claims the task after a slot is granted. Raises ClaimMissedError."""
        deps = self._deps
        self.is_over_capacity = self._stop is None and not self._host.admit(self)
        if self._stop is not None or self.is_over_capacity:
            raise ClaimMissedError
        claim = await self._claim()
        if claim is None:
            raise ClaimMissedError
        await deps.failpoints.reach(Failpoint.CLAIMED, self.task.id)
        if self._stop is not None:
            raise ClaimMissedError
        self._start_helper(self._write_output(), "task-writer")
        self._start_helper(self._enforce_timeout(), "task-timer")
        self._start_helper(self._publish_progress(), "task-progress")
        if self._call is not None:
            # A running task may get a watcher at any time; batch items are read after their end.
            self._call.set_unary(bool(self.task.batch) and not deps.events.is_watched(self.task.id))
        log.info("task started", task=self.task.id, attempt=claim.attempt, owner=claim.owner)

    async def _claim(self) -> TaskLease | None:
        deps, now = self._deps, self._deps.database_clock.now()
        self.is_claiming = True
        try:
            claim = await deps.store.claim(self.task.id, deps.owner, now, now + deps.limits.lease_seconds)
            self.claim = claim
        except WeftError as error:
            self.refusal, self.is_unwritten = error, True
            raise ClaimMissedError from error
        finally:
            self.is_claiming = False
        if claim is not None:
            log.info("task claimed", task=claim.task_id, attempt=claim.attempt, owner=claim.owner)
            self._host.note_claimed(self)
            self._host.publish(TaskChanged(claim.task_id))
        return claim

    async def _note_refusal(self, error: WeftError) -> None:
        if isinstance(error, ClaimMissedError) or self._stop is not None:
            return
        is_cancelled = bool(canceller_of(error))
        if is_cancelled or isinstance(after_refused_offer(error, 1), GivesUp):
            # Only the owner of a claim may end a task.
            with suppress(ClaimMissedError):
                await self._claim()
        else:
            self.refusal = error

    # -- after the claim

    def _note_progress(self, output: task_pb2.TaskOutput) -> None:
        for event in output.events:
            if event.HasField("work_progress"):
                self.progress = event.work_progress
                self._has_progressed.set()

    async def _publish_progress(self) -> None:
        """Reports merged progress to watchers, until cancelled."""
        deps = self._deps
        while True:
            await self._has_progressed.wait()
            await deps.database_clock.clock.sleep(PROGRESS_INTERVAL_SECONDS)
            self._has_progressed.clear()
            self._host.publish(TaskChanged(self.task.id))

    async def _conclude(self, claim: TaskLease, error: WeftError | None) -> None:
        try:
            await self._settle_attempt(claim, error)
        finally:
            self.progress = None
        # Delete results that nothing refers to, and the inputs of an ended task.
        tenant = self.task.lane.tenant
        if self._ended != task_pb2.TASK_STATE_COMPLETED and self._media.has_files:
            await self._deps.media.release(tenant, claim.task_id, (claim.attempt,))
        await self._deps.media.release_inputs(tenant, claim.task_id, has_ended=self._ended is not None)

    async def _settle_attempt(self, claim: TaskLease, error: WeftError | None) -> None:
        match self._stop:
            case StopReason.LOST:
                _log_lost(claim)
            case StopReason.CANCELLED:
                log.info("task attempt cancelled", task=claim.task_id, attempt=claim.attempt, owner=claim.owner)
            case StopReason.WITHDRAWN:
                chunks = await self._recording.rest()
                await self._stop_helpers()
                await self._end(claim, task_pb2.TASK_STATE_CANCELLED, chunks, None)
            case StopReason.HALTED:
                await self._stop_helpers()
                failure = task_error(Reason.SHUTTING_DOWN, "the router stopped")
                await self._revert(claim, failure, TryAgain(0.0, counts=False))
            case StopReason.TIMED_OUT:
                await self._stop_helpers()
                seconds = self._deps.limits.run_timeout_seconds
                message = f"the attempt took longer than {seconds:g} s (router.tasks.run_timeout_seconds)"
                # Whether the write in progress reached the disk is unknown.
                await self._fail(claim, WeftError(Reason.DEADLINE_EXCEEDED, message), ())
            case None:
                chunks = await self._recording.rest()
                await self._stop_helpers()
                if error is None:
                    await self._end(claim, task_pb2.TASK_STATE_COMPLETED, chunks, None)
                else:
                    await self._fail(claim, error, chunks)

    async def _fail(self, claim: TaskLease, error: WeftError, chunks: Sequence[NewChunk]) -> None:
        if canceller_of(error):
            failure = task_error(error.reason, error.log_message)
            await self._end(claim, task_pb2.TASK_STATE_CANCELLED, chunks, failure)
            return
        limits = self._deps.limits
        verdict = after_failed_attempt(
            error,
            claim.attempt,
            self.task.failures,
            self.task.max_attempts,
            was_taken=self._was_taken,
            first_pause_seconds=limits.retry_delay_seconds,
            max_seconds=limits.max_retry_delay_seconds,
        )
        if isinstance(error, ResultsFullError):
            verdict = GivesUp(error.reason, error.log_message)
        if isinstance(verdict, GivesUp):
            failure = task_error(verdict.reason, verdict.message)
            kept = () if error.reason is Reason.REQUEST_TOO_LARGE else chunks
            await self._end(claim, task_pb2.TASK_STATE_FAILED, kept, failure)
        else:
            failure = task_error(error.reason, error.log_message)
            await self._revert(claim, failure, verdict)

    async def _end(
        self,
        claim: TaskLease,
        state: "task_pb2.TaskState.ValueType",
        chunks: Sequence[NewChunk],
        failure: task_pb2.TaskError | None,
    ) -> None:
        deps = self._deps
        outcome = TaskOutcome(state=state, chunks=chunks, failure=failure, receipt=self._receipt())
        if not await self._settle(claim, lambda: deps.store.end(claim, outcome, deps.database_clock.now())):
            _log_lost(claim)
            return
        self._ended = state
        await deps.failpoints.reach(Failpoint.ENDED, claim.task_id)
        reason = None if failure is None else reason_of(failure.reason).name
        log.info("task ended", task=claim.task_id, attempt=claim.attempt, state=state_name(state), reason=reason)
        self._host.publish(TaskChanged(claim.task_id))
        if self.task.batch:
            self._host.publish(ItemEnded(self.task.batch))
        await deps.spans.task_ended(self.task, has_failed=state == task_pb2.TASK_STATE_FAILED)

    async def _revert(self, claim: TaskLease, failure: task_pb2.TaskError, again: TryAgain) -> None:
        deps, receipt, counts = self._deps, self._receipt(), again.counts

        def write() -> Coroutine[None, None, bool]:
            now = deps.database_clock.now()
            ready_at = now + again.pause_seconds
            return deps.store.revert(claim, failure, receipt=receipt, counts=counts, now=now, ready_at=ready_at)

        if not await self._settle(claim, write):
            _log_lost(claim)
            return
        self.ready_at = deps.database_clock.now() + again.pause_seconds
        retry = task_pb2.TaskRetry(
            error=failure,
            next_time=stamp_of(self.ready_at) if again.pause_seconds else None,
            failed_count=self.task.failures + int(counts),
            max_attempts=self.task.max_attempts,
        )
        self._host.publish(TaskPaused(claim.task_id, retry))
        reason = reason_of(failure.reason).name
        log.info("task reverted", task=claim.task_id, attempt=claim.attempt, reason=reason, counts=counts)
        self._host.publish(TaskChanged(claim.task_id))
        self._host.publish(LaneFilled(self.task.lane))

    async def _append(self, chunks: Sequence[NewChunk]) -> None:
        claim = self.claim
        assert claim is not None, "output is written under a claim only"
        if not await self._settle(claim, lambda: self._deps.store.append(claim, chunks)):
            self._stop = self._stop or StopReason.LOST
            raise ClaimMissedError
        self._host.publish(TaskChanged(claim.task_id))

    async def _settle(self, claim: TaskLease, write: Callable[[], Awaitable[bool]]) -> bool:
        """Writes under the claim, with retries while the database is unavailable. False: claim lost, or given up."""
        clock = self._deps.database_clock.clock
        give_up_at = clock.monotonic() + WRITE_PATIENCE_SECONDS
        pause = FIRST_WRITE_PAUSE_SECONDS
        while True:
            try:
                return await write()
            except WeftError as error:
                if self._stop is StopReason.LOST or clock.monotonic() >= give_up_at:
                    log.warning("task result dropped", task=claim.task_id, attempt=claim.attempt, why=error.message)
                    return False
            await clock.sleep(pause)
            pause = min(2 * pause, MAX_WRITE_PAUSE_SECONDS)

    async def _write_output(self) -> None:
        try:
            await self._recording.keep_writing()
        except ClaimMissedError:
            self.stop(StopReason.LOST)

    async def _enforce_timeout(self) -> None:
        await self._deps.database_clock.clock.sleep(self._deps.limits.run_timeout_seconds)
        self.stop(StopReason.TIMED_OUT)

    def _start_helper(self, work: Coroutine[None, None, None], name: str) -> None:
        self._helpers.append(start_task(work, name=f"{name}-{self.task.id}"))

    async def _stop_helpers(self) -> None:
        for helper in self._helpers:
            helper.cancel()
        if self._helpers:
            await asyncio.wait(self._helpers)

    def _receipt(self) -> bytes:
        receipt = None if self._call is None else self._call.receipt
        return b"" if receipt is None else receipt.SerializeToString()


def _log_lost(claim: TaskLease) -> None:
    log.warning("task lease lost", task=claim.task_id, attempt=claim.attempt, owner=claim.owner)


def _waiting_reason_of(output: task_pb2.TaskOutput) -> str:
    """Returns the reason in a status message of the scheduler; empty: there is none."""
    for event in output.events:
        kind = event.WhichOneof("event")
        if kind == "queued":
            return event.queued.reason
        if kind == "loading":
            return event.loading.stage
    return ""


def _error_of(reading: asyncio.Task[None], stop: StopReason | None) -> WeftError | None:
    """Returns the error that ended a call; None: it is complete, or was stopped externally."""
    if reading.cancelled() and stop is None:
        # gRPC also cancels a call when its channel is closed, so the answer is incomplete.
        return WeftError(Reason.WORKER_LOST, "the call to the runner was interrupted")
    error = None if reading.cancelled() else reading.exception()
    if error is None or isinstance(error, WeftError):
        return error
    log.error("a task's request failed unexpectedly", exc_info=error)
    return WeftError(Reason.INTERNAL, "an internal error; the router's log has the details")
