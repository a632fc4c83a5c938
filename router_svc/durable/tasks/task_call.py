"""The call of a task: placed and run like a live request, and claimed when its slot is granted.

Claiming on grant means that no lease runs while a task waits for a slot. A claimed task does not wait either: if a
runner fails before any content and no other is immediately free, the attempt fails and the task is pending again.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from google.protobuf.message import DecodeError
from typing_extensions import override

from router_svc.durable.tasks.task_media import TaskMedia
from router_svc.durable.tasks.task_records import PendingTask
from router_svc.durable.tasks.task_spans import traceparent_of_task
from weft.api.common.v1 import audio_pb2, event_pb2, receipt_pb2
from weft.api.router.v1 import task_pb2
from weft.dispatch.agents import KnownNames
from weft.dispatch.call import Call
from weft.dispatch.dispatcher import Dispatcher
from weft.dispatch.fleet import FleetSource
from weft.dispatch.operation_table import SpeechPiece, operation_of
from weft.dispatch.parameter_checks import client_of, handling_of, labels_of, session_of
from weft.dispatch.placement import Decision, OnCancelled, Placement, PlacementPort
from weft.dispatch.request_receipt import RequestContext
from weft.dispatch.run_observer import RunObserver
from weft.durable.media import media_parts
from weft.durable.tasks import payload_of
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import Operation
from weft.kernel.telemetry.tracing import NO_TRACING, Tracing
from weft.kernel.time.clock import Clock
from weft.kernel.values.unknown_names import unknown_target
from weft.link.carried_calls import CallStreams

_WHOLE = frozenset({Operation.IMAGE, Operation.TRANSCRIPTION})
"""Streamed operations whose attempts are read only when complete."""

Gate = Callable[[], Awaitable[None]]
"""Claims the task; raises ClaimMissedError if another router has it, or it is no longer pending."""


class ClaimMissedError(WeftError):
    """A slot was granted, but the task could not be claimed."""

    def __init__(self) -> None:
        super().__init__(Reason.LEASE_LOST, "another router has claimed the task, or it is not pending any more")


class GatedPlacement(PlacementPort):
    """A PlacementPort for a task; its first grant must pass the gate."""

    def __init__(self, port: PlacementPort, gate: Gate) -> None:
        self._port = port
        self._gate = gate
        self.is_claimed = False
        self.failed: Reason | None = None
        """Why the last runner failed; None: none failed."""

    @override
    def place(self, request: PlacementRequest) -> "GatedPlace":
        return GatedPlace(self._port.place(request), self)

    async def pass_gate(self) -> None:
        """Claims the task unless it is claimed. Raises ClaimMissedError."""
        if not self.is_claimed:
            await self._gate()
            self.is_claimed = True


class GatedPlace(Placement):
    """A Placement that claims the task before returning the first grant."""

    def __init__(self, place: Placement, gated: GatedPlacement) -> None:
        self._place = place
        self._gated = gated

    async def __aenter__(self) -> Self:
        await self._place.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._place.__aexit__(kind, error, trace)

    async def next_decision(self) -> Decision:
        """Returns the next decision. Also raises ClaimMissedError, after the slot is released."""
        decision = await self._place.next_decision()
        if decision.HasField("granted"):
            try:
                await self._gated.pass_gate()
            except WeftError:
                # Released immediately as a cancellation, which does not count against the runner.
                await self._place.report_finished(Reason.CANCELLED)
                raise
        elif self._gated.failed is not None:
            raise WeftError(self._gated.failed, "the runner failed, and no other one is free now")
        return decision

    @override
    def watch_cancellation(self, on_cancelled: OnCancelled) -> None:
        self._place.watch_cancellation(on_cancelled)

    @override
    async def report_first_content(self, attempt: int) -> None:
        await self._place.report_first_content(attempt)

    @override
    async def report_attempt_failed(
        self, attempt: int, reason: Reason, message: str = "", retry_after_seconds: float | None = None
    ) -> None:
        self._gated.failed = reason
        await self._place.report_attempt_failed(attempt, reason, message, retry_after_seconds)

    @override
    async def report_finished(self, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> bool:
        return await self._place.report_finished(reason, receipt)


@dataclass(slots=True, kw_only=True)
class CallMaker:
    """Creates calls of tasks on the dispatcher of live requests."""

    placement: PlacementPort
    streams: CallStreams
    fleet: FleetSource
    clock: Clock
    names: KnownNames | None = None
    """The names in the mesh; None: every name is placed."""
    tracing: Tracing = NO_TRACING
    media: TaskMedia = field(default_factory=lambda: TaskMedia(None))
    """Reads tasks' input images and recordings."""
    observers: Sequence[RunObserver] = ()
    """See `Dispatcher.observers`."""

    def make(self, task: PendingTask, gate: Gate) -> "TaskCall":
        """Returns the call of a task; its first grant must pass the gate.

        Raises if the stored spec is unusable, and MODEL_NOT_FOUND for a target that is not in the mesh.
        """
        if self.names is not None and not self.names.has(task.lane.model):
            # The scheduler would also refuse it, and record a failed request each time; so the task only waits.
            raise unknown_target(task.lane.model)
        try:
            spec = task_pb2.TaskSpec.FromString(task.spec)
        except DecodeError as error:
            raise WeftError(Reason.MALFORMED_REQUEST, "the stored spec of the task cannot be read") from error
        payload = payload_of(spec)
        if payload is None:
            raise WeftError(Reason.INVALID_ARGUMENT, "the task has a payload that this release does not know")
        has_media = any(part.file_id for _, part in media_parts(payload))

        async def claim_and_fill() -> None:
            await gate()
            # Read after the slot is granted, so that waiting tasks hold no recordings in memory.
            await self.media.fill(task.lane.tenant, task.id, payload)

        gated = GatedPlacement(self.placement, claim_and_fill if has_media else gate)
        dispatcher = Dispatcher(gated, self.streams, clock=self.clock, fleet=self.fleet, tracing=self.tracing)
        dispatcher.observers = self.observers
        operation = operation_of(payload)
        context = context_of(task, spec, operation.operation, traceparent_of_task(task.id, spec, self.tracing))
        return TaskCall(dispatcher.call(operation, context, payload))


class TaskCall:
    """The call of a task through the dispatcher of live requests. It starts when its outputs are read."""

    def __init__(self, call: Call[Any]) -> None:
        self._call = call
        # An image or recording is not sent before it is complete, so that losing the runner costs only an attempt.
        self._call.whole = call.spec.operation in _WHOLE

    @property
    def receipt(self) -> receipt_pb2.Receipt | None:
        """The receipt; None until the call has finished."""
        return self._call.receipt

    def set_unary(self, unary: bool) -> None:
        """Sets whether the answer is requested unary rather than streamed, from the next attempt on."""
        self._call.whole = unary or self._call.spec.operation in _WHOLE

    async def outputs(self) -> AsyncGenerator[task_pb2.TaskOutput]:
        """Yields status messages and output, `finished` last; raises the call's error. Closing it cancels the call."""
        spec = self._call.spec
        if not spec.streamed:
            result = await self._call.result()
            finished = event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=self._call.receipt))
            yield task_pb2.TaskOutput(events=[finished], **spec.fields(result))
            return
        if spec.operation is Operation.SPEECH:
            async with aclosing(self._spoken()) as outputs:
                async for output in outputs:
                    yield output
            return
        async with aclosing(self._call.chunks()) as frames:
            async for frame in frames:
                yield task_pb2.TaskOutput(**spec.fields(frame))

    async def _spoken(self) -> AsyncGenerator[task_pb2.TaskOutput]:
        async with aclosing(self._call.chunks()) as pieces:
            async for piece in pieces:
                if isinstance(piece, SpeechPiece):
                    part = audio_pb2.SpeechPart(data=piece.data, media_type=piece.media_type)
                    yield task_pb2.TaskOutput(events=[event_pb2.InferenceEvent(speech=part)])
        finished = event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=self._call.receipt))
        yield task_pb2.TaskOutput(events=[finished])


def context_of(task: PendingTask, spec: task_pb2.TaskSpec, operation: Operation, traceparent: str) -> RequestContext:
    """Returns the request context of a task. Raises INVALID_ARGUMENT for options that are no longer valid."""
    return RequestContext(
        request_id=task.id,
        task_id=task.id,
        tenant=task.lane.tenant,
        caller=task.caller,
        model=task.lane.model,
        operation=operation,
        traceparent=traceparent,
        priority=task.lane.band,
        allow_remote=spec.options.allow_remote,
        handling=handling_of(spec.options),
        client_id=client_of(spec.options),
        session=session_of(spec.options),
        labels=labels_of(spec.options),
        asked_model=spec.asked_model,
        metadata=spec.metadata,
    )
