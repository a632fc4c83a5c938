"""The session of one publisher: its tasks, its event stream, and whether it is there."""

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from runner_svc.policy.publisher_presence import Presence, PresenceLimits, check_seconds, is_stalled, loss_of
from runner_svc.publishers.messages import TaskRequest, cancel_event, end_event, task_event
from runner_svc.publishers.settings import PublisherLimits
from runner_svc.publishers.task import PublisherTask
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

MAX_KEPT_FAILURES = 256
"""Failures that wait for the request that they belong to."""


def publisher_lost(why: str) -> WeftError:
    """Returns the error of the tasks of a publisher that is gone."""
    return WeftError(Reason.WORKER_LOST, f"the publisher is gone: {why}")


@dataclass(eq=False, slots=True)
class EventStream:
    """The events that one connection of a publisher is to be sent."""

    waiting: deque[bytes] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False
    """Whether nothing follows what waits."""

    def put(self, event: bytes, *, is_last: bool = False) -> None:
        """Adds an event."""
        if not self.is_over:
            self.waiting.append(event)
            self.is_over = is_last
            self.changed.set()

    async def take(self) -> bytes:
        """Returns all events that wait, at least one; empty: the stream has ended."""
        while not self.waiting and not self.is_over:
            self.changed.clear()
            await self.changed.wait()
        events = b"".join(self.waiting)
        self.waiting.clear()
        return events


class PublisherSession:
    """A publisher that is registered. It ends once: lost, replaced, left, or with its edge."""

    def __init__(self, runner: str, secret: str, limits: PublisherLimits, clock: Clock) -> None:
        self.runner = runner
        self.secret = secret
        self.limits = limits
        self.streaming = asyncio.Event()
        """Set while it has an event stream."""
        self.ended = asyncio.Event()
        self.end_error: WeftError | None = None
        self._clock = clock
        self._presence_limits = PresenceLimits(
            reconnect_seconds=limits.reconnect_seconds,
            silence_seconds=limits.silence_timeout_seconds,
            task_silence_seconds=limits.task_silence_seconds,
        )
        self._tasks: dict[str, PublisherTask] = {}
        self._failures: OrderedDict[str, WeftError] = OrderedDict()
        """Failures of tasks, by the request that each was for."""
        self._stream: EventStream | None = None
        self._last_request = self._stream_lost = clock.monotonic()

    @property
    def task_count(self) -> int:
        """The number of tasks that have not ended."""
        return len(self._tasks)

    def note_request(self) -> None:
        """Notes that the publisher is there."""
        self._last_request = self._clock.monotonic()

    def begin(self) -> None:
        """Notes that the session is registered: from here on its event stream is due."""
        self._last_request = self._stream_lost = self._clock.monotonic()

    def open_stream(self) -> EventStream:
        """Returns a new event stream, which replaces an earlier one. Tasks without a result are sent again over it."""
        if self._stream is not None:
            words = "a newer event stream of this session has replaced this one"
            self._stream.put(end_event(WeftError(Reason.RESOURCE_CHANGED, words)), is_last=True)
        self._stream = EventStream()
        for task in self._tasks.values():
            if not task.is_begun:
                self._stream.put(task_event(task.id, task.request))
        self.streaming.set()
        return self._stream

    def close_stream(self, stream: EventStream) -> None:
        """Notes that the connection of an event stream has ended."""
        if self._stream is stream:
            self._stream, self._stream_lost = None, self._clock.monotonic()
            self.streaming.clear()

    def submit(self, request: TaskRequest) -> PublisherTask:
        """Gives the publisher a task. Raises NO_SLOT_AVAILABLE at the limit, WORKER_LOST once the session has ended."""
        if self.end_error is not None:
            raise self.end_error
        if len(self._tasks) >= self.limits.max_tasks:
            message = f"the publisher has {self.limits.max_tasks} tasks, which is its limit (publishers.max_tasks)"
            raise WeftError(Reason.NO_SLOT_AVAILABLE, message)
        task = PublisherTask(request, self.limits.max_waiting_chunks, self._clock.monotonic())
        self._tasks[task.id] = task
        if self._stream is not None:
            self._stream.put(task_event(task.id, request))
        return task

    def task(self, task_id: str) -> PublisherTask:
        """Returns a task of this publisher. Raises NOT_FOUND, also for the task of another one."""
        task = self._tasks.get(task_id)
        if task is None:
            raise WeftError(Reason.NOT_FOUND, "there is no such task: it has ended, or its caller has left")
        return task

    def close_task(self, task: PublisherTask) -> None:
        """Forgets a task; takes it back from the publisher where its answer is not whole."""
        if self._tasks.pop(task.id, None) is None:
            return
        if task.failure is not None:
            self._keep_failure(task.request.request_id, task.failure)
        task.fail(WeftError(Reason.CANCELLED, "the caller has left"))
        if task.failure is not None and self._stream is not None:
            self._stream.put(cancel_event(task.id, task.failure))

    def failure_of(self, request_id: str) -> WeftError | None:
        """Returns the failure of the task of a request, once; None: there was none."""
        return self._failures.pop(request_id, None)

    def end(self, error: WeftError) -> None:
        """Ends the session and its tasks. Idempotent."""
        if self.end_error is not None:
            return
        self.end_error = error
        if self._stream is not None:
            self._stream.put(end_event(error), is_last=True)
        for task in list(self._tasks.values()):
            task.fail(error)
        self.ended.set()

    async def watch(self) -> None:
        """Ends the session when the publisher is lost, and tasks that stall. Returns once the session has ended."""
        while self.end_error is None:
            await self._clock.sleep(check_seconds(self._presence_limits))
            self.look()

    def look(self) -> None:
        """Does what `watch` does, once."""
        now = self._clock.monotonic()
        lost_since = None if self._stream is not None else self._stream_lost
        presence = Presence(last_request=self._last_request, stream_lost=lost_since)
        if why := loss_of(presence, self._presence_limits, now):
            self.end(publisher_lost(why))
            return
        for task in list(self._tasks.values()):
            if not task.has_ended and is_stalled(
                task.last_line, waits_for_caller=task.waits_for_caller, limits=self._presence_limits, now=now
            ):
                limit = f"publishers.task_silence_seconds, {self.limits.task_silence_seconds:g} s"
                words = f"the publisher sent no line of the result ({limit})"
                task.fail(WeftError(Reason.STALL_TIMEOUT, words))

    def _keep_failure(self, request_id: str, error: WeftError) -> None:
        self._failures[request_id] = error
        while len(self._failures) > MAX_KEPT_FAILURES:
            self._failures.popitem(last=False)
