"""Requests that run as durable tasks while their callers watch; gateways handle them like other requests.

When the caller leaves, the task is cancelled or continues, by its options. Content of a lost attempt is never continued
with another attempt's; the caller gets an error instead.
"""

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from weft.api.common.v1 import embedding_pb2, event_pb2
from weft.api.router.v1 import inference_service_pb2, task_pb2, task_service_pb2
from weft.dispatch.call import Call, Layer, Proceed
from weft.dispatch.frames import Frame, has_content
from weft.dispatch.operation_table import EMBEDDING, SPEECH, SpeechPiece
from weft.dispatch.request_receipt import Journal, RequestContext, WhenLeft
from weft.durable.batches import FileClient
from weft.durable.media import filled, referring_part
from weft.durable.tasks import TaskClient, TaskPayload, failure_of, is_terminal
from weft.kernel.channels.rpc import MAX_MESSAGE_BYTES
from weft.kernel.errors.error_tree import WeftError, with_field
from weft.kernel.errors.reasons import Reason, reason_of
from weft.kernel.requests.request_values import TASK_OPERATIONS, TEXT_OPERATIONS, Priority
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock

TASK_ID = "task_id"
"""Metadata key of an error for the task id."""
MIN_PENDING_SECONDS = 1.0
_NANOSECONDS = 1e9
_SPEC = "spec"
"""The task store's field name for a request."""
_PAYLOADS = task_pb2.TaskSpec.DESCRIPTOR.oneofs_by_name["payload"].fields
_WATCH_AGAIN = frozenset({Reason.SERVICE_UNAVAILABLE, Reason.SHUTTING_DOWN, Reason.WATCH_LAGGED})
"""Errors that end a watch but not its task."""

log = get_logger("weft.request")


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableCallConfig:
    """Time limits of a durable call."""

    outage_limit_seconds: float = 30.0
    """Maximum outage of the task store before the request fails."""
    retry_interval_seconds: float = 0.1
    """First pause before watching again; doubles up to a second."""
    settle_seconds: float = 5.0
    """Timeout for cancelling a durable task after its caller left, and for the caller to leave."""


@dataclass(frozen=True, slots=True)
class DurableCallDeps:
    """Dependencies of a gateway's durable requests."""

    tasks: TaskClient
    clock: Clock
    config: DurableCallConfig
    files: FileClient | None = None
    """Stores tasks' images and recordings; None: requests with such do not become tasks."""


def task_spec(
    context: RequestContext, payload: TaskPayload, *, origin: bytes = b"", origin_kind: str = ""
) -> task_pb2.TaskSpec:
    """Returns the task of a request, with a priority class only if the caller set one."""
    spec = task_pb2.TaskSpec(
        model=context.model,
        options=_options(context),
        origin=origin,
        origin_kind=origin_kind,
        traceparent=context.traceparent,
        user=context.user,
        metadata=context.metadata,
        asked_model=context.asked_model,
    )
    [kind] = (each for each in _PAYLOADS if each.message_type == payload.DESCRIPTOR)
    getattr(spec, kind.name).CopyFrom(payload)
    return spec


def _options(context: RequestContext) -> inference_service_pb2.RequestOptions:
    handling = context.handling
    options = inference_service_pb2.RequestOptions(
        priority=_allowed(context).wire if context.names_priority else 0,  # type: ignore[arg-type]  # same numbers
        allow_remote=context.allow_remote,
        cache_mode=handling.cache_mode.value,  # type: ignore[arg-type]  # same numbers
        cache_tag=handling.cache_tag,
        client_id=context.client_id,
        session=context.session,
        labels=context.labels,
    )
    if handling.keep_alive_seconds is not None:
        options.keep_alive.FromNanoseconds(math.ceil(handling.keep_alive_seconds * _NANOSECONDS))
    if handling.prefix_seconds:
        options.prefix_keep_alive.FromNanoseconds(math.ceil(handling.prefix_seconds * _NANOSECONDS))
    return options


def _allowed(context: RequestContext) -> Priority:
    """Returns the priority class of a task: it runs later, without its caller's key."""
    return context.priority.within(context.max_priority)


def durable_spec(context: RequestContext, journal: Journal, payload: TaskPayload) -> task_pb2.TaskSpec:
    """Returns the task of a request with a watching caller, including its priority class and deadline."""
    spec = task_spec(context, payload)
    spec.options.priority = _allowed(context).wire  # type: ignore[assignment]  # same numbers
    if journal.idempotency_key:
        # Each repetition of a request has another trace.
        spec.traceparent = ""
    if journal.when_left is WhenLeft.CANCEL and context.timeout_seconds is not None:
        seconds = max(MIN_PENDING_SECONDS, context.timeout_seconds)
        spec.pending_limit.FromNanoseconds(math.ceil(seconds * _NANOSECONDS))
    return spec


def of_request(error: WeftError) -> WeftError:
    """Returns an error about a task's spec in terms of the caller's request."""
    field = error.metadata.get("field", "")
    if field.partition(".")[0] != _SPEC:
        return error
    inner = field.removeprefix(_SPEC).removeprefix(".").removeprefix("payload.")
    if inner in {"", "origin"}:
        words = error.message.removeprefix(f"{field}: ")
        return WeftError(error.reason, f"the request {words}")
    return with_field(error, inner)


class WatchedTask:
    """A task that its submitter watches to its end."""

    def __init__(self, tools: DurableCallDeps, context: RequestContext, journal: Journal, payload: TaskPayload) -> None:
        self._tools = tools
        self._context = context
        self._journal = journal
        self._payload = payload
        self._submitting: asyncio.Future[task_service_pb2.SubmitTaskResponse] | None = None
        self._has_ended = False
        self.id = ""
        """Empty until it is durable."""

    async def events(self) -> AsyncGenerator[task_service_pb2.WatchTaskResponse]:
        """Submits the task and yields its events, with the final state last.

        Closing the iterator earlier means that the caller disconnected. Raises as `TaskClient.submit`, and
        SERVICE_UNAVAILABLE after a long outage of the task store.
        """
        try:
            await self._submit()
            async with aclosing(self._watched()) as found:
                async for item in found:
                    self._has_ended = _is_end(item)
                    yield item
        finally:
            if not self._has_ended:
                await self._leave()

    async def lost(self) -> WeftError:
        """Returns the error of an attempt that was lost after content was sent."""
        reason, words = await self._why_lost()
        kept = self._journal.when_left is WhenLeft.KEEP
        then = f"task {self.id} continues" if kept else f"task {self.id} is cancelled"
        message = f"the answer was interrupted and would start again ({words}); {then}"
        return WeftError(reason, message, metadata={TASK_ID: self.id, "content_started": "true"})

    async def _why_lost(self) -> tuple[Reason, str]:
        try:
            async with asyncio.timeout(self._tools.config.settle_seconds):
                details = await self._tools.tasks.details(self._context.tenant, self.id)
        except (WeftError, TimeoutError):
            return Reason.WORKER_LOST, "its attempt was lost"
        ended = [each for each in details.attempts if each.reason]
        if not ended:
            return Reason.WORKER_LOST, "its attempt was lost"
        return reason_of(ended[-1].reason), ended[-1].message or "its attempt was lost"

    async def _submit(self) -> None:
        context = self._context
        request = task_service_pb2.SubmitTaskRequest(
            spec=durable_spec(context, self._journal, self._payload),
            idempotency_key=self._journal.idempotency_key,
            request_id=context.request_id,
        )
        # A caller who leaves during the submission must not leave an unknown task behind, so the result is awaited.
        submission = self._tools.tasks.submit(context.tenant, request, caller=context.caller)
        self._submitting = asyncio.ensure_future(submission)
        try:
            submitted = await asyncio.shield(self._submitting)
        except WeftError as error:
            self._has_ended = True
            log.info("not journaled", request_id=context.request_id, reason=error.reason.name.lower())
            raise of_request(error) from None
        self.id = submitted.task.id
        self._journal.on_task(self.id)
        log.info("journaled", request_id=context.request_id, task_id=self.id, existed=submitted.existed)

    async def _watched(self) -> AsyncGenerator[task_service_pb2.WatchTaskResponse]:
        """Watches the task, again after each watch that ends early."""
        clock, config = self._tools.clock, self._tools.config
        after, lost_at, pause = 0, None, config.retry_interval_seconds
        while True:
            failure = WeftError(Reason.SERVICE_UNAVAILABLE, "the router ended the watch of a task that continues")
            try:
                async with aclosing(self._tools.tasks.watch(self._context.tenant, self.id, after)) as found:
                    async for item in found:
                        lost_at, pause = None, config.retry_interval_seconds
                        if item.HasField("piece"):
                            if item.piece.last_event <= after:
                                continue
                            after = item.piece.last_event
                        elif _is_ahead(item.task, after):
                            continue
                        yield item
                        if _is_end(item):
                            return
            except WeftError as error:
                if error.reason not in _WATCH_AGAIN:
                    raise
                failure = error
            now = clock.monotonic()
            lost_at = now if lost_at is None else lost_at
            if now - lost_at >= config.outage_limit_seconds:
                failure.metadata[TASK_ID] = self.id
                raise failure
            await clock.sleep(pause)
            pause = min(pause * 2, 1.0)

    async def _leave(self) -> None:
        """Cancels the task unless it is to continue, because the caller disconnected or got an error."""
        if self._submitting is None:
            return
        if self._journal.when_left is WhenLeft.KEEP and not self._journal.is_ended():
            self._submitting.add_done_callback(_noted)
            log.info("caller left, task continues", request_id=self._context.request_id, task_id=self.id or None)
            return
        # Neither a second cancellation nor the timeout cancels the submission.
        ending = asyncio.ensure_future(self._end(self._submitting))
        await asyncio.wait((ending,), timeout=self._tools.config.settle_seconds)

    async def _end(self, submitting: "asyncio.Future[task_service_pb2.SubmitTaskResponse]") -> None:
        try:
            # Without a timeout, as a task that becomes durable late must not run without a caller.
            task_id = (await submitting).task.id
            async with asyncio.timeout(self._tools.config.settle_seconds):
                await self._tools.tasks.cancel(self._context.tenant, task_id)
        except (WeftError, TimeoutError) as error:
            reason = error.reason.name.lower() if isinstance(error, WeftError) else "timeout"
            log.warning("task not cancelled", request_id=self._context.request_id, task_id=self.id, reason=reason)


def _is_end(item: task_service_pb2.WatchTaskResponse) -> bool:
    """Whether an event of a watch is the finished task."""
    return item.HasField("task") and is_terminal(item.task)


def _noted(submitting: "asyncio.Future[task_service_pb2.SubmitTaskResponse]") -> None:
    """Retrieves the result of an abandoned future, as an unretrieved error would cause a warning."""
    if not submitting.cancelled():
        submitting.exception()


def durable_calls(
    tasks: TaskClient, clock: Clock, config: DurableCallConfig | None = None, *, files: FileClient | None = None
) -> Layer[Any]:
    """Returns the layer that runs requests with a journal as tasks.

    `files` stores their images and recordings; None: requests with such do not become tasks.
    """
    deps = DurableCallDeps(tasks, clock, config or DurableCallConfig(), files)

    def layer(call: Call[Any], /, proceed: Proceed[Any]) -> AsyncGenerator[Any]:
        journal = call.context.journal
        possible = TEXT_OPERATIONS if files is None else TASK_OPERATIONS
        if journal is None or call.spec.operation not in possible:
            return proceed(call)
        if call.spec is SPEECH:
            return _speech(deps, journal, call)
        if call.spec is EMBEDDING:
            return _embeddings(deps, journal, call)
        return _Generation(deps, journal, call).frames()

    return layer


class _Generation:
    """A generation that runs as a durable task."""

    def __init__(self, deps: DurableCallDeps, journal: Journal, call: Call[Frame]) -> None:
        self._deps = deps
        self._task = WatchedTask(deps, call.context, journal, call.payload)
        self._call = call
        self._progress: event_pb2.WorkProgress | None = None
        """None: none was sent."""
        self._attempt = 0
        self._held: Frame = []
        """Frames of this attempt for a caller who reads only the complete answer, as another attempt may follow."""
        self._has_content = False
        self._end: event_pb2.InferenceEvent | None = None

    async def frames(self) -> AsyncGenerator[Frame]:
        """Yields every stored frame and, while the task waits, the reason.

        An answer that is only read when complete is one frame, of the completed attempt. Raises the WeftError of a
        failed task, CANCELLED for a cancelled task, and the reason of an attempt that was lost after content was sent.
        """
        async with aclosing(self._task.events()) as events:
            async for item in events:
                if self._has_content and _is_lost(item, self._attempt):
                    raise await self._task.lost()
                if item.HasField("piece"):
                    frame = self._chunk_frame(await self._whole(item.piece))
                else:
                    frame = self._task_frame(item.task)
                if frame:
                    yield frame

    async def _whole(self, piece: task_pb2.TaskPiece) -> task_pb2.TaskPiece:
        """Returns a piece with the data of its images."""
        files = self._deps.files
        if files is None or not any(referring_part(event) for event in piece.output.events):
            return piece
        (output,) = await filled(files, self._call.context.tenant, [piece.output], max_bytes=MAX_MESSAGE_BYTES)
        return task_pb2.TaskPiece(attempt=piece.attempt, last_event=piece.last_event, output=output)

    def _chunk_frame(self, chunk: task_pb2.TaskPiece) -> Frame:
        self._reach(chunk.attempt)
        frame = list(chunk.output.events)
        if frame and frame[-1].HasField("finished"):
            # Held back until the task has ended, as this attempt may still be lost.
            self._end = frame.pop()
        if self._call.whole:
            self._held += frame
            return []
        self._has_content = self._has_content or has_content(frame)
        return frame

    def _task_frame(self, task: task_pb2.Task) -> Frame:
        self._reach(task.attempt)
        if not is_terminal(task):
            return [_waiting(task)] if task.state == task_pb2.TASK_STATE_PENDING else self._new_progress(task)
        require_completed(task)
        if self._end is None:
            return []
        self._call.receipt = self._end.finished.receipt
        return [*self._held, self._end]

    def _new_progress(self, task: task_pb2.Task) -> Frame:
        if not task.HasField("progress") or task.progress == self._progress:
            return []
        self._progress = task.progress
        return [event_pb2.InferenceEvent(work_progress=task.progress)]

    def _reach(self, attempt: int) -> None:
        if attempt != self._attempt:
            self._attempt, self._held, self._end = attempt, [], None


async def _output_of(deps: DurableCallDeps, journal: Journal, call: Call[Any]) -> task_pb2.TaskOutput:
    """Returns the output of a durable task. Raises the error of a failed task, CANCELLED for a cancelled one."""
    output, attempt = task_pb2.TaskOutput(), 0
    async with aclosing(WatchedTask(deps, call.context, journal, call.payload).events()) as events:
        async for item in events:
            of_attempt = item.piece.attempt if item.HasField("piece") else item.task.attempt
            if of_attempt != attempt:
                attempt, output = of_attempt, task_pb2.TaskOutput()
            output.MergeFrom(item.piece.output)
            if _is_end(item):
                require_completed(item.task)
    for event in output.events:
        if event.HasField("finished"):
            call.receipt = event.finished.receipt
    return output


async def _embeddings(
    deps: DurableCallDeps, journal: Journal, call: Call[list[embedding_pb2.Embedding]]
) -> AsyncGenerator[list[embedding_pb2.Embedding]]:
    yield list((await _output_of(deps, journal, call)).embeddings)


async def _speech(deps: DurableCallDeps, journal: Journal, call: Call[SpeechPiece]) -> AsyncGenerator[SpeechPiece]:
    events = (await _output_of(deps, journal, call)).events
    spoken = next((event.speech for event in events if event.HasField("speech")), None)
    if spoken is None or deps.files is None:
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the model sent an empty recording")
    media_type = spoken.media_type
    async with aclosing(deps.files.read(call.context.tenant, spoken.file_id)) as pieces:
        async for data in pieces:
            yield SpeechPiece(data=data, media_type=media_type)
            media_type = ""


def require_completed(task: task_pb2.Task) -> None:
    """Raises the WeftError of a failed task, CANCELLED for a cancelled one."""
    if task.state == task_pb2.TASK_STATE_CANCELLED:
        by_id = failure_of(task)
        message = f"task {task.id} was cancelled" if by_id is None else by_id.message
        raise WeftError(Reason.CANCELLED, message, metadata={TASK_ID: task.id})
    if task.state == task_pb2.TASK_STATE_FAILED:
        error = failure_of(task) or WeftError(Reason.INTERNAL, f"task {task.id} failed")
        error.metadata[TASK_ID] = task.id
        raise error


def _is_lost(item: task_service_pb2.WatchTaskResponse, attempt: int) -> bool:
    """Whether the watched attempt was lost while the task continues."""
    if item.HasField("piece"):
        return item.piece.attempt != attempt
    task = item.task
    if task.state in {task_pb2.TASK_STATE_FAILED, task_pb2.TASK_STATE_CANCELLED}:
        return False
    return task.state == task_pb2.TASK_STATE_PENDING or task.attempt != attempt


def _is_ahead(task: task_pb2.Task, after: int) -> bool:
    """Whether a completed task has more chunks; its final state is then sent again after them."""
    return task.state == task_pb2.TASK_STATE_COMPLETED and task.last_event > after


def _waiting(task: task_pb2.Task) -> event_pb2.InferenceEvent:
    return event_pb2.InferenceEvent(queued=event_pb2.Queued(reason=task.waiting_for or "the task waits for a slot"))
