"""The data plane: generation, embeddings, rerank, tokens, images, transcription, speech, as calls on streams."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message

from runner_svc.backend.port import ENGINE_METHODS, CallInfo, not_offered
from runner_svc.chat.chat_request import ChatRequest, ChatSetup
from runner_svc.chat.tool_loop import converse
from runner_svc.chat.turn import kills_repetition
from runner_svc.instance.admission import AdmittedRequest
from runner_svc.instance.instance import Instance
from runner_svc.servicers.request_admission import RequestAdmission, call_info, require_abilities
from weft.api.common.v1 import event_pb2, receipt_pb2, workflow_pb2
from weft.api.runner.v1 import generation_service_pb2, serve_options_pb2, ticket_pb2
from weft.api.runner.v1 import model_call_service_pb2 as pb
from weft.dispatch.frames import Frame, apart, has_content
from weft.dispatch.operation_table import CHAT, IMAGE, OPERATIONS, SPEECH, TOKENIZE, TRANSCRIPTION, OperationSpec
from weft.dispatch.parameter_checks import handling_of
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.link.carried_calls import CarriedCalls, CarriedContext

MAX_HELD_EVENTS = 256
"""Maximum number of held-back events of a non-streaming answer, which limits the message size."""


class AnswerWriter:
    """Builds the messages of one answer from its frames, with `started` before the first one.

    Chunks of a non-streaming answer after the first content are held back until its end, because each message costs
    both sides about 60 us (measured). Every other event is sent immediately with the held chunks: the caller sees that
    the answer has begun, and receives tool calls, warnings and progress as in a stream.
    """

    def __init__(self, started: event_pb2.InferenceEvent, *, whole: bool, joined_texts: bool = False) -> None:
        """`joined_texts`: the dispatcher accepts deltas that join texts."""
        self._whole = whole
        self._joined_texts = joined_texts
        self._held: Frame = [started]
        self._has_begun = False

    def message_of(self, frame: Frame) -> generation_service_pb2.GenerateResponse | None:
        """Returns the message for a frame; None: it is held back until a later one."""
        held = self._held
        # A text that is read only when complete is whole without the lengths of its pieces.
        held += frame if self._joined_texts or self._whole else apart(frame)
        if self._whole and self._has_begun and len(held) < MAX_HELD_EVENTS and _only_deltas(frame):
            return None
        self._held = []
        if self._whole and not self._has_begun:
            self._has_begun = has_content(held)
        response = generation_service_pb2.GenerateResponse()
        # Passing them to the constructor takes twice the time.
        response.events.extend(held)
        return response


def _only_deltas(frame: Frame) -> bool:
    return all(event.HasField("delta") for event in frame)


MAX_WHOLE_BYTES = 128 * 1024 * 1024
"""Maximum size of images or a transcript that are held back until they are complete."""


class WholeAnswerWriter:
    """Writes the frames of images or a transcription.

    If the answer is read only when complete, its content is held back until the end, while progress is sent
    immediately: if the runner is lost before the end, the request can be retried. Content beyond MAX_WHOLE_BYTES is
    sent.
    """

    def __init__(self, write: Callable[[Frame], Awaitable[None]], *, whole: bool) -> None:
        self._write = write
        self._holds = whole
        self._held: list[Frame] = []
        self._held_bytes = 0

    async def put(self, frame: Frame) -> None:
        """Sends a frame, now or at the end."""
        is_end = _receipt_in(frame) is not None
        if self._holds and not is_end and has_content(frame):
            self._held.append(frame)
            self._held_bytes += sum(event.ByteSize() for event in frame)
            self._holds = self._held_bytes <= MAX_WHOLE_BYTES
            if self._holds:
                return
            frame = []
        if not self._holds or is_end:
            held, self._held = self._held, []
            for each in held:
                await self._write(each)
        if frame:
            await self._write(frame)


def _receipt_in(frame: Frame) -> receipt_pb2.Receipt | None:
    """Returns the receipt in the last frame of an answer; None for any other frame."""
    return frame[-1].finished.receipt if frame and frame[-1].WhichOneof("event") == "finished" else None


MAX_SPEECH_MESSAGE_BYTES = 256 * 1024


class DataPlane:
    """The runner's services for requests, one method for each runner rpc of the table of operations."""

    def __init__(self, desk: RequestAdmission, chats: Mapping[str, ChatSetup]) -> None:
        """`chats`: the setup of conversations, by model."""
        self._desk = desk
        self._chats = chats

    def add_to_server(self, server: grpc.aio.Server) -> CarriedCalls:
        """Adds the streams on which dispatchers call the services to a server, and returns them."""
        unary = {spec.runner_rpc: partial(self._answer, spec) for spec in OPERATIONS.values() if not spec.streamed}
        media = {spec.runner_rpc: partial(self._stream, spec) for spec in (IMAGE, TRANSCRIPTION)}
        carried = CarriedCalls({CHAT.runner_rpc: self._generate, SPEECH.runner_rpc: self._speak, **unary, **media})
        carried.add_to_server(server)
        return carried

    async def _generate(self, request: generation_service_pb2.GenerateRequest, context: CarriedContext) -> None:
        permit, instance = self._desk.admit(request.ticket)
        setup = self._chats[permit.model]
        call = call_info(
            permit,
            instance,
            context,
            whole=request.options.whole,
            joins_texts=True,
            ends_loops=kills_repetition(request.behaviour, setup.settings),
            provider_headers=request.options.provider_headers,
        )
        chat = ChatRequest(
            payload=_payload(request),
            call=call,
            behaviour=request.behaviour,
            agent=request.agent,
            allow_remote=permit.allow_remote,
        )
        with self._working(permit, instance, request.options, chat.payload, call) as work:
            if request.agent or request.options.HasField("prefix_keep_alive"):
                handling = handling_of(request.options)
                work.notes = await instance.idle_work.note(chat, permit.model, permit.tenant, handling)
            answer = AnswerWriter(
                self._desk.started(permit), whole=call.whole, joined_texts=request.options.joined_texts
            )
            work.note_prompt(chat.payload)
            async with aclosing(converse(work, chat, setup)) as frames:
                async for frame in frames:
                    if (receipt := _receipt_in(frame)) is not None:
                        self._complete(receipt, permit, instance, work)
                        self._desk.caches.note(permit.model, receipt.usage)
                    if (message := answer.message_of(frame)) is not None:
                        await context.write(message)

    def _complete(
        self, receipt: receipt_pb2.Receipt, permit: ticket_pb2.TicketClaims, instance: Instance, work: AdmittedRequest
    ) -> None:
        work.record.answered = True
        receipt.left_premises = work.record.left_premises
        work.note_device_usage(receipt)
        self._desk.complete(receipt, permit, instance)

    async def _stream(self, spec: OperationSpec[Any, Any], request: Any, context: CarriedContext) -> None:
        permit, instance = self._desk.admit(request.ticket)
        ENGINE_METHODS[spec.operation].check(request.payload)
        if permit.model != instance.model:
            raise not_offered(spec.operation)
        call = call_info(permit, instance, context, whole=request.options.whole)
        if spec is IMAGE and request.HasField("workflow"):
            call = replace(call, workflow=_workflow(request, instance))
        response = spec.runner_rpc.response
        with self._working(permit, instance, request.options, request.payload, call) as work:
            answer = WholeAnswerWriter(lambda frame: context.write(response(events=frame)), whole=call.whole)
            await answer.put([self._desk.started(permit)])
            async with aclosing(work.stream(spec.operation, request.payload, call)) as frames:
                async for frame in frames:
                    if (receipt := _receipt_in(frame)) is not None:
                        self._complete(receipt, permit, instance, work)
                    await answer.put(frame)

    async def _answer(self, spec: OperationSpec[Any, Any], request: Any, context: CarriedContext) -> Any:
        permit, instance = self._desk.admit(request.ticket)
        ENGINE_METHODS[spec.operation].check(request.payload)
        if permit.model != instance.model and spec.operation not in instance.config.adapter_operations:
            raise not_offered(spec.operation)
        call = call_info(permit, instance, context, provider_headers=request.options.provider_headers)
        with self._working(
            permit, instance, request.options, request.payload, call, takes_slot=spec.takes_slot
        ) as work:
            result = await work.run(spec.operation, request.payload, call)
            receipt = receipt_pb2.Receipt()
            work.note_wall_time(receipt)
        if isinstance(result, Message):
            response = spec.runner_rpc.response(receipt=receipt, **{spec.field: result})
        else:
            receipt.usage.CopyFrom(result.usage)
            response = spec.runner_rpc.response(receipt=receipt, **{spec.field: getattr(result, spec.field)})
        if spec is TOKENIZE and not response.result.max_context_tokens:
            response.result.max_context_tokens = instance.loader.context_tokens
        work.note_device_usage(response.receipt)
        self._desk.complete(response.receipt, permit, instance)
        return response

    async def _speak(self, request: pb.SpeakRequest, context: CarriedContext) -> None:
        permit, instance = self._desk.admit(request.ticket)
        call, told, receipt = call_info(permit, instance, context), "", receipt_pb2.Receipt()
        with self._working(permit, instance, request.options, request.payload, call) as work:
            async with aclosing(work.speak(request.payload, call)) as parts:
                async for part in parts:
                    for start in range(0, len(part.data), MAX_SPEECH_MESSAGE_BYTES):
                        piece = part.data[start : start + MAX_SPEECH_MESSAGE_BYTES]
                        media_type = "" if told else part.media_type
                        told = part.media_type
                        await context.write(pb.SpeakResponse(data=piece, media_type=media_type))
                    receipt = part.receipt or receipt
            work.record.answered = True
            work.note_wall_time(receipt)
            work.note_device_usage(receipt)
            self._desk.complete(receipt, permit, instance)
            await context.write(pb.SpeakResponse(receipt=receipt))

    def _working(
        self,
        permit: ticket_pb2.TicketClaims,
        instance: Instance,
        options: serve_options_pb2.ServeOptions,
        payload: Any,
        call: CallInfo,
        *,
        takes_slot: bool = True,
    ) -> AbstractContextManager[AdmittedRequest]:
        """Like `RequestAdmission.hold`, for a payload. Raises as `require_abilities`."""
        require_abilities(instance, permit.model, payload)
        return self._desk.hold(permit, instance, options, call, takes_slot=takes_slot)


def _workflow(request: pb.StreamImagesRequest, instance: Instance) -> workflow_pb2.Workflow:
    """Returns the workflow of a request. Raises UNSUPPORTED_OPERATION if the engine cannot run workflows."""
    if not instance.backend.takes_workflows:
        message = f"{instance.model} runs no workflows; name a model of the runtime comfyui in the workflow"
        raise WeftError(Reason.UNSUPPORTED_OPERATION, message, metadata={"model": instance.model})
    return request.workflow


def _payload(request: generation_service_pb2.GenerateRequest) -> Any:
    kind = request.WhichOneof("payload")
    if kind is None:
        raise invalid_field("payload", "must be set")
    return getattr(request, kind)
