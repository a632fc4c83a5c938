"""A task as the request that it becomes, placed and run like any other."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from google.protobuf.message import DecodeError

from router_svc.durable.tasks.store_port import PendingTask
from weft.api.common.v1 import chat_pb2, completion_pb2, embedding_pb2, event_pb2, receipt_pb2
from weft.api.router.v1 import task_pb2
from weft.dispatch.dispatcher import Dispatcher, EmbeddingCall, GenerationCall
from weft.dispatch.fleet import FleetSource
from weft.dispatch.handling import client_of, handling_of, session_of
from weft.dispatch.placement import Decision, Grant, Placement, PlacementPort, PlacementRequest
from weft.dispatch.request_trace import RequestContext
from weft.durable.tasks import TaskPayload, payload_of
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation
from weft.kernel.rpc import ChannelPool
from weft.kernel.telemetry import new_traceparent, valid_traceparent

Gate = Callable[[], Awaitable[None]]
"""Claims the task; raises ClaimMissedError where somebody else has it, or it waits no more."""


class ClaimMissedError(WeftError):
    """There is nothing to do with the slot that was granted."""

    def __init__(self) -> None:
        super().__init__(Reason.LEASE_LOST, "the task is somebody else's, or waits no more")


class GatedPlacement:
    """A PlacementPort for one task, whose first grant must pass a gate."""

    def __init__(self, port: PlacementPort, gate: Gate) -> None:
        self._port = port
        self._gate = gate
        self.is_claimed = False
        self.failed: Reason | None = None
        """Why the last attempt of a runner failed; None: none has."""

    def place(self, request: PlacementRequest) -> "GatedPlace":
        """See PlacementPort.place."""
        return GatedPlace(self._port.place(request), self)

    async def pass_gate(self) -> None:
        """Claim, unless that is done. Raises ClaimMissedError."""
        if not self.is_claimed:
            await self._gate()
            self.is_claimed = True


class GatedPlace:
    """See Placement."""

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
        """See Placement.next_decision. Raises ClaimMissedError with the slot given back."""
        decision = await self._place.next_decision()
        if isinstance(decision, Grant):
            try:
                await self._gated.pass_gate()
            except WeftError:
                # At once, and as if its caller had left: the runner is none the worse for it.
                await self._place.report_finished(Reason.CANCELLED)
                raise
        elif self._gated.failed is not None:
            raise WeftError(self._gated.failed, "the runner failed, and no other one is free at once")
        return decision

    async def report_first_content(self, attempt: int) -> None:
        """See Placement.report_first_content."""
        await self._place.report_first_content(attempt)

    async def report_attempt_failed(self, attempt: int, reason: Reason) -> None:
        """See Placement.report_attempt_failed."""
        self._gated.failed = reason
        await self._place.report_attempt_failed(attempt, reason)

    async def report_finished(self, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> None:
        """See Placement.report_finished."""
        await self._place.report_finished(reason, receipt)


class TaskCall(Protocol):
    """A task's request. Nothing happens until its outputs are read."""

    @property
    def receipt(self) -> receipt_pb2.Receipt | None:
        """What happened, once it is over; None before that."""
        ...

    def read_whole(self, whole: bool) -> None:
        """From the next attempt on: whether nobody reads the answer before it is complete."""
        ...

    def outputs(self) -> AsyncGenerator[task_pb2.TaskOutput]:
        """What the scheduler and the runner say, `finished` last; raises what ended it. Leaving it ends the work."""
        ...


class CallMaker(Protocol):
    """Who makes requests of tasks."""

    def make(self, task: PendingTask, gate: Gate) -> TaskCall:
        """The request of a task, whose first grant passes the gate. Raises what is wrong with what was kept of it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchedCalls:
    """A CallMaker over the dispatcher that live requests use."""

    placement: PlacementPort
    channels: ChannelPool
    fleet: FleetSource
    clock: Clock

    def make(self, task: PendingTask, gate: Gate) -> TaskCall:
        """See CallMaker.make."""
        try:
            spec = task_pb2.TaskSpec.FromString(task.spec)
        except DecodeError as error:
            raise WeftError(Reason.MALFORMED_REQUEST, "what was kept of the task cannot be read") from error
        payload = payload_of(spec)
        if payload is None:
            raise WeftError(Reason.INVALID_ARGUMENT, "the task asks for something that this release does not know")
        gated = GatedPlacement(self.placement, gate)
        dispatcher = Dispatcher(gated, self.channels, clock=self.clock, fleet=self.fleet)
        context = context_of(task, spec, payload)
        if isinstance(payload, embedding_pb2.EmbeddingPayload):
            return EmbeddingTask(dispatcher.embed(context, payload))
        return GenerationTask(dispatcher.generate(context, payload))


class GenerationTask:
    """See TaskCall."""

    def __init__(self, call: GenerationCall) -> None:
        self._call = call

    @property
    def receipt(self) -> receipt_pb2.Receipt | None:
        """See TaskCall.receipt."""
        return self._call.receipt

    def read_whole(self, whole: bool) -> None:
        """See TaskCall.read_whole."""
        self._call.read_whole(whole=whole)

    async def outputs(self) -> AsyncGenerator[task_pb2.TaskOutput]:
        """See TaskCall.outputs."""
        async with aclosing(self._call.frames()) as frames:
            async for frame in frames:
                yield task_pb2.TaskOutput(events=frame)


class EmbeddingTask:
    """See TaskCall."""

    def __init__(self, call: EmbeddingCall) -> None:
        self._call = call

    @property
    def receipt(self) -> receipt_pb2.Receipt | None:
        """See TaskCall.receipt."""
        return self._call.receipt

    def read_whole(self, whole: bool) -> None:
        """See TaskCall.read_whole: an embedding comes whole in any case."""

    async def outputs(self) -> AsyncGenerator[task_pb2.TaskOutput]:
        """See TaskCall.outputs."""
        embeddings = await self._call.result()
        finished = event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=self._call.receipt))
        yield task_pb2.TaskOutput(events=[finished], embeddings=embeddings)


def context_of(task: PendingTask, spec: task_pb2.TaskSpec, payload: TaskPayload) -> RequestContext:
    """Who asks for what. Raises INVALID_ARGUMENT for options that no longer may be."""
    return RequestContext(
        request_id=task.id,
        tenant=task.lane.tenant,
        caller=task.caller,
        model=task.lane.model,
        operation=_operation_of(payload),
        traceparent=valid_traceparent(spec.traceparent) or new_traceparent(),
        priority=task.lane.band,
        allow_remote=spec.options.allow_remote,
        handling=handling_of(spec.options),
        client_id=client_of(spec.options),
        session=session_of(spec.options),
    )


def _operation_of(payload: TaskPayload) -> Operation:
    match payload:
        case chat_pb2.ChatPayload():
            return Operation.CHAT
        case completion_pb2.CompletionPayload():
            return Operation.COMPLETION
        case _:
            return Operation.EMBEDDING
