"""gRPC translation for the runner's data plane: ticket in, frames out."""

import asyncio
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from runner_svc.answer_writer import AnswerWriter
from runner_svc.backend.port import CallInfo
from runner_svc.cache.desk import CacheDesk
from runner_svc.chat.conversation import converse
from runner_svc.chat.request import ChatRequest, ChatSetup
from runner_svc.clock_offset import ClockOffset
from runner_svc.instance import Instance
from runner_svc.records import RequestRecord
from runner_svc.work import Work
from weft.api.common.v1 import event_pb2, receipt_pb2
from weft.api.runner.v1 import (
    embedding_service_pb2,
    embedding_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    serve_options_pb2,
)
from weft.dispatch.frames import Frame
from weft.dispatch.handling import granted_priority_of, handling_of
from weft.dispatch.tickets import Permit, TicketGate
from weft.kernel.clock import Clock, clock_off
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft.kernel.rpc import answering
from weft.kernel.telemetry import TRACEPARENT, trace_id_of, traceparent_of

log = structlog.get_logger("weft.runner")

GenerateContext = grpc.aio.ServicerContext[
    generation_service_pb2.GenerateRequest, generation_service_pb2.GenerateResponse
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerIdentity:
    """Who works here."""

    runner: str
    incarnation: str
    host: str


class WorkDesk:
    """What both data-plane services need: the gate, the instances, and the runner's part of a receipt."""

    def __init__(
        self,
        *,
        identity: RunnerIdentity,
        gate: TicketGate,
        instances: Mapping[str, Instance],
        caches: CacheDesk,
        remote_models: AbstractSet[str],
        clock: Clock,
        clock_offset: ClockOffset | None = None,
    ) -> None:
        """`remote_models`: serving them sends bytes off the premises. `clock`: the mesh's."""
        self._clock_offset = clock_offset
        self._identity = identity
        self._gate = gate
        self._instances = instances
        self._remote_models = remote_models
        self._clock = clock
        self.caches = caches

    @contextmanager
    def hold(
        self,
        permit: Permit,
        instance: Instance,
        options: serve_options_pb2.ServeOptions,
        *,
        takes_slot: bool = True,
    ) -> Iterator[Work]:
        """Work on a permitted request for the length of the block, as its options say. Raises as Instance.admit.

        Raises INVALID_ARGUMENT naming an option that is out of range.
        """
        handling = handling_of(options)
        held = instance.admit(
            permit.request_id,
            keep_alive_seconds=handling.keep_alive_seconds,
            priority=granted_priority_of(options),
            takes_slot=takes_slot,
        )
        with held as work:
            work.cache = self.caches.of_request(permit.model, permit.tenant, handling)
            yield work

    def admit(self, ticket: Any) -> tuple[Permit, Instance]:
        """Check a ticket and find the instance it is for.

        Raises TICKET_INVALID, TICKET_EXPIRED or MODEL_NOT_FOUND; CLOCK_OFF while this machine's clock is too far off.
        """
        permit = self._gate.admit(ticket, now=self._clock.utc_now().timestamp())
        if self._clock_offset is not None and self._clock_offset.is_refused:
            raise clock_off(self._identity.runner, self._clock_offset.seconds)
        instance = self._instances.get(permit.model)
        if instance is None:
            raise WeftError(Reason.MODEL_NOT_FOUND, f"this runner does not serve {permit.model}")
        if permit.model in self._remote_models and not permit.allow_remote:
            raise WeftError(Reason.TICKET_INVALID, "the ticket does not let this request leave the premises")
        return permit, instance

    def started(self, permit: Permit) -> event_pb2.InferenceEvent:
        """The event that says who works on the request."""
        return event_pb2.InferenceEvent(
            started=event_pb2.Started(
                runner=self._identity.runner,
                runner_incarnation=self._identity.incarnation,
                model=permit.model,
                attempt=permit.attempt,
            )
        )

    def complete(self, receipt: receipt_pb2.Receipt, permit: Permit, instance: Instance) -> None:
        """Add the runner's own facts to a backend's receipt."""
        receipt.request_id = permit.request_id
        receipt.model = permit.model
        receipt.model_digest = instance.digest
        receipt.host = self._identity.host
        if not instance.memory.holds_devices:
            # The time that an engine computed without an accelerator that we know of is no time of a GPU.
            receipt.ClearField("gpu_time")
        receipt.left_premises = receipt.left_premises or permit.model in self._remote_models


class GenerationServicer(generation_service_pb2_grpc.GenerationServiceServicer):
    """See GenerationService."""

    def __init__(self, desk: WorkDesk, chats: Mapping[str, ChatSetup]) -> None:
        """`chats`: what all conversations with a model have in common, by its name."""
        self._desk = desk
        self._chats = chats

    async def Generate(  # type: ignore[override]  # noqa: N802 - the rpc's name; a coroutine that writes
        self, request: generation_service_pb2.GenerateRequest, context: GenerateContext
    ) -> None:
        """See GenerationService.Generate.

        It writes and does not yield: a fault that ends the request while its caller is slow to read must end it inside
        the block of `admit`, and so with its reason. gRPC drops a generator there, and the caller hears nothing.
        """
        async with answering(context):
            permit, instance = self._desk.admit(request.ticket)
            call = call_info(permit, context, whole=request.options.whole)
            chat = ChatRequest(
                payload=_payload(request),
                call=call,
                behaviour=request.behaviour,
                agent=request.agent,
                allow_remote=permit.allow_remote,
            )
            with self._desk.hold(permit, instance, request.options) as work:
                answer = AnswerWriter(context.write, self._desk.started(permit), whole=call.whole)
                try:
                    async with aclosing(converse(work, chat, self._chats[instance.model])) as frames:
                        async for frame in frames:
                            self._complete(frame, permit, instance, work.record)
                            await answer.put(frame)
                except WeftError as error:
                    log_failure(call, instance, error)
                    raise

    def _complete(self, frame: Frame, permit: Permit, instance: Instance, record: RequestRecord) -> None:
        if frame[-1].WhichOneof("event") == "finished":
            record.answered = True
            receipt = frame[-1].finished.receipt
            receipt.left_premises = record.left_premises
            self._desk.complete(receipt, permit, instance)
            self._desk.caches.note(permit.model, receipt.usage)


class EmbeddingServicer(embedding_service_pb2_grpc.EmbeddingServiceServicer):
    """See EmbeddingService."""

    def __init__(self, desk: WorkDesk) -> None:
        self._desk = desk

    async def Embed(  # noqa: N802 - the rpc's name
        self,
        request: embedding_service_pb2.EmbedRequest,
        context: grpc.aio.ServicerContext[embedding_service_pb2.EmbedRequest, embedding_service_pb2.EmbedResponse],
    ) -> embedding_service_pb2.EmbedResponse:
        """See EmbeddingService.Embed."""
        async with answering(context):
            permit, instance = self._desk.admit(request.ticket)
            if not request.payload.inputs:
                raise invalid_field("payload.inputs", "must not be empty")
            call = call_info(permit, context)
            with self._desk.hold(permit, instance, request.options) as work:
                try:
                    result = await work.embed(request.payload, call)
                except WeftError as error:
                    log_failure(call, instance, error)
                    raise
            response = embedding_service_pb2.EmbedResponse(embeddings=result.embeddings)
            response.receipt.usage.CopyFrom(result.usage)
            self._desk.complete(response.receipt, permit, instance)
            return response
        raise AssertionError("abort has raised")


_QUOTING = frozenset({Reason.TOOL_CALL_INVALID, Reason.REPEATED_LINE_LOOP})
"""Errors whose messages quote what a model wrote: content of users, which belongs into no log."""


def log_failure(call: CallInfo, instance: Instance, error: WeftError) -> None:
    """The one log line of an attempt that failed."""
    log.warning(
        "attempt failed",
        request_id=call.request_id,
        trace_id=trace_id_of(call.traceparent),
        model=instance.model,
        reason=error.reason.name.lower(),
        message=None if error.reason in _QUOTING else error.message,
    )


def _payload(request: generation_service_pb2.GenerateRequest) -> Any:
    kind = request.WhichOneof("payload")
    if kind is None:
        raise invalid_field("payload", "must be set")
    return getattr(request, kind)


def call_info(permit: Permit, context: grpc.aio.ServicerContext[Any, Any], *, whole: bool = False) -> CallInfo:
    """What a backend is told of a request. `whole`: nobody reads the answer before it is complete."""
    metadata = {key: str(value) for key, value in context.invocation_metadata() or () if key == TRACEPARENT}
    left = context.time_remaining()
    answer_by = None if left is None else asyncio.get_running_loop().time() + left
    return CallInfo(
        request_id=permit.request_id, traceparent=traceparent_of(metadata), answer_by=answer_by, whole=whole
    )
