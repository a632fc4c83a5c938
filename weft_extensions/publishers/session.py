"""The session of a publisher: its tasks, its event stream, and its liveness."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import Clock
from weft.kernel.values.names import new_id
from weft_extensions.publishers.messages import Chunk, Whole, event, failure_event


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherLimits:
    """Limits of publishers, their tasks and their results."""

    max_sessions: int = 64
    """Maximum number of registered publishers."""
    max_chunk_bytes: int = 262_144
    """Maximum size of one line of a result: one chunk of an answer."""
    max_answer_bytes: int = 67_108_864
    """Maximum total size of the posts for one task."""
    heartbeat_interval_seconds: float = 30.0
    """Interval of a publisher's heartbeats."""
    silence_timeout_seconds: float = 90.0
    """Time without a request of a publisher after which its session ends."""
    reconnect_seconds: float = 5.0
    """Time within which a publisher must open its event stream, initially and after a loss; then its session ends."""
    task_silence_seconds: float = 120.0
    """Time without a line of a task's result after which the task ends with STALL_TIMEOUT."""
    max_models: int = 64
    """Maximum number of models of one publisher."""
    max_tasks: int = 256
    """Maximum number of unfinished tasks of one publisher."""
    max_connections: int = 1024
    """Maximum number of concurrent connections; further ones are closed."""
    max_registration_bytes: int = 262_144
    """Maximum size of a registration."""
    max_waiting_chunks: int = 64
    """Maximum number of chunks of one task that wait for a slow caller; then the publisher's post waits."""
    open_timeout_seconds: float = 15.0
    """Maximum duration of a registration request."""


class PublisherTask:
    """A request of a runner. One coroutine reads the answer; posts write it, and wait while too much is unread."""

    def __init__(self, max_waiting: int, now: float) -> None:
        self.id = new_id("ptk")
        self.event = b""
        """The event that submits it to the publisher."""
        self.last_line = now
        """When the last line of its result arrived, when its caller last had parts to read, or when it was created."""
        self.is_begun = False
        """Whether the publisher has sent anything for it."""
        self.received_bytes = 0
        self.failure: WeftError | None = None
        """Why it ended without a whole answer."""
        self.on_failure: list[Callable[[], None]] = []
        self._max_waiting = max_waiting
        self._pieces: deque[Chunk | Whole] = deque()
        self._is_complete = False
        self._changed = asyncio.Event()

    @property
    def waits_for_caller(self) -> bool:
        """Whether parts of its answer are unread."""
        return bool(self._pieces)

    @property
    def has_ended(self) -> bool:
        """Whether it accepts no further lines."""
        return self._is_complete or self.failure is not None

    async def put(self, piece: Chunk | Whole | None, now: float) -> None:
        """Adds a piece of the answer. Raises NOT_FOUND once the task has ended."""
        self.last_line, self.is_begun = now, True
        if piece is not None:
            await self._until(lambda: self.has_ended or len(self._pieces) < self._max_waiting)
        if self.has_ended:
            raise self.refusal()
        if piece is not None:
            self._pieces.append(piece)
            self._is_complete = isinstance(piece, Whole) or piece.done
            self._changed.set()

    async def next(self) -> Chunk | Whole:
        """Returns the next piece of the answer. After the last one, raises the task's failure."""
        await self._until(lambda: bool(self._pieces) or self.failure is not None)
        if not self._pieces and self.failure is not None:
            raise self.failure
        piece = self._pieces.popleft()
        self._changed.set()
        return piece

    def fail(self, error: WeftError) -> None:
        """Ends the task unless its answer is complete. Received pieces are read before the failure."""
        if self.has_ended:
            return
        self.failure = error
        self._changed.set()
        for call in tuple(self.on_failure):
            call()

    def refusal(self) -> WeftError:
        """Returns the error for a post to an ended task."""
        why = "its answer is complete" if self.failure is None else self.failure.message
        return WeftError(Reason.NOT_FOUND, f"the task has ended: {why}")

    async def _until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            self._changed.clear()
            await self._changed.wait()


EventStream = asyncio.Queue[bytes]
"""Events to send over a publisher's connection; an empty one closes it."""


class PublisherSession:
    """A registered publisher. It ends once: lost, replaced, signed off, or with its listener."""

    def __init__(self, runner: str, secret: str, limits: PublisherLimits, clock: Clock) -> None:
        self.runner = runner
        self.secret = secret
        self.limits = limits
        self.clock = clock
        self.tasks: dict[str, PublisherTask] = {}
        """Unfinished tasks by id."""
        self.streaming = asyncio.Event()
        """Set while it has an event stream."""
        self.ended = asyncio.Event()
        self.end_error: WeftError | None = None
        self._stream: EventStream | None = None
        self._last_request = self._stream_lost = clock.monotonic()

    def note_request(self) -> None:
        """Records that the publisher sent a request."""
        self._last_request = self.clock.monotonic()

    def begin(self) -> None:
        """Records that the session is registered, which starts the timeout for its event stream."""
        self._last_request = self._stream_lost = self.clock.monotonic()

    def open_stream(self) -> EventStream:
        """Returns a new event stream, which replaces an earlier one. Sends unstarted tasks again over it."""
        words = "a newer event stream of this session has replaced this one"
        self._end_stream(WeftError(Reason.RESOURCE_CHANGED, words))
        self._stream = EventStream()
        for task in self.tasks.values():
            if not task.is_begun:
                self._stream.put_nowait(task.event)
        self.streaming.set()
        return self._stream

    def close_stream(self, stream: EventStream) -> None:
        """Records that the connection of an event stream has ended."""
        if self._stream is stream:
            self._stream, self._stream_lost = None, self.clock.monotonic()
            self.streaming.clear()

    def submit(self, **request: object) -> PublisherTask:
        """Submits a task to the publisher. Raises NO_SLOT_AVAILABLE at the limit, WORKER_LOST after the end."""
        if self.end_error is not None:
            raise WeftError(Reason.WORKER_LOST, self.end_error.message)
        if len(self.tasks) >= self.limits.max_tasks:
            message = f"the publisher has {self.limits.max_tasks} tasks, which is its limit"
            raise WeftError(Reason.NO_SLOT_AVAILABLE, message)
        task = PublisherTask(self.limits.max_waiting_chunks, self.clock.monotonic())
        task.event = event("task", task=task.id, **request)
        self.tasks[task.id] = task
        if self._stream is not None:
            self._stream.put_nowait(task.event)
        return task

    def close_task(self, task: PublisherTask) -> None:
        """Removes a task; cancels it at the publisher if its answer is incomplete."""
        if self.tasks.pop(task.id, None) is None or (task.has_ended and task.failure is None):
            return
        failure = task.failure or WeftError(Reason.CANCELLED, "the caller disconnected")
        # Sent before the publisher's post is answered, so that it knows why.
        if self._stream is not None:
            self._stream.put_nowait(failure_event("cancel", failure, task=task.id))
        task.fail(failure)

    def end(self, error: WeftError) -> None:
        """Ends the session and its tasks. Idempotent."""
        if self.end_error is not None:
            return
        self.end_error = error
        self._end_stream(error)
        for task in list(self.tasks.values()):
            task.fail(error)
        self.ended.set()

    def _end_stream(self, error: WeftError) -> None:
        if self._stream is not None:
            self._stream.put_nowait(failure_event("end", error))
            self._stream.put_nowait(b"")

    async def watch(self) -> None:
        """Ends the session when the publisher is lost, and tasks that stall. Returns once the session has ended."""
        limits = self.limits
        shortest = min(limits.reconnect_seconds, limits.silence_timeout_seconds, limits.task_silence_seconds)
        while self.end_error is None:
            await self.clock.sleep(min(1.0, shortest / 4))
            self.look()

    def look(self) -> None:
        """Runs one check of `watch`."""
        now, limits = self.clock.monotonic(), self.limits
        if self._stream is None and now - self._stream_lost >= limits.reconnect_seconds:
            self._lose(f"it had no event stream for {limits.reconnect_seconds:g} s")
        elif now - self._last_request >= limits.silence_timeout_seconds:
            seconds = limits.silence_timeout_seconds
            self._lose(f"no heartbeat for {seconds:g} s")
        else:
            seconds = limits.task_silence_seconds
            stalled = WeftError(Reason.STALL_TIMEOUT, f"the publisher sent no line of the result for {seconds:g} s")
            for task in list(self.tasks.values()):
                # Time while the caller does not read does not count: the publisher's next line may wait for it.
                if task.waits_for_caller:
                    task.last_line = now
                elif now - task.last_line >= seconds:
                    task.fail(stalled)

    def _lose(self, why: str) -> None:
        self.end(WeftError(Reason.WORKER_LOST, f"the publisher is gone: {why}"))
