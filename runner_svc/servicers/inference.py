"""gRPC servicers of the data plane: generation, embeddings, rerank, tokens, images, transcription, speech."""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
from typing_extensions import override

from runner_svc.backend.port import CallInfo
from runner_svc.chat.conversation import converse
from runner_svc.chat.request import ChatRequest, ChatSetup
from runner_svc.instance.admission import AdmittedRequest
from runner_svc.instance.instance import Instance
from runner_svc.request_records import RequestRecord
from runner_svc.servicers.request_admission import RequestAdmission, call_info, log_failure
from weft.api.common.v1 import event_pb2, receipt_pb2
from weft.api.runner.v1 import (
    embedding_service_pb2,
    embedding_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    model_call_service_pb2_grpc,
)
from weft.api.runner.v1 import model_call_service_pb2 as pb
from weft.dispatch.frames import Frame, has_content
from weft.dispatch.tickets import Permit
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.rpc import answering

MAX_HELD_EVENTS = 256
"""Events of a non-streaming answer that are held back at most, so that no message gets too large."""


class AnswerWriter:
    """Writes the frames of one answer, `started` before the first one.

    Chunks of a non-streaming answer that follow the first content are held until its end: each message costs both ends
    some 60 us (measured). Every other event is sent at once, with the held chunks: the caller sees that the answer has
    begun, and receives tool calls, warnings and progress as in a stream.
    """

    def __init__(
        self,
        write: Callable[[generation_service_pb2.GenerateResponse], Awaitable[None]],
        started: event_pb2.InferenceEvent,
        *,
        whole: bool,
    ) -> None:
        self._write = write
        self._whole = whole
        self._held: Frame = [started]
        self._has_begun = False

    async def put(self, frame: Frame) -> None:
        """Send a frame, now or with a following one."""
        held = self._held
        held += frame
        if self._whole and self._has_begun and len(held) < MAX_HELD_EVENTS and _only_deltas(frame):
            return
        self._held = []
        if self._whole and not self._has_begun:
            self._has_begun = has_content(held)
        await self._write(generation_service_pb2.GenerateResponse(events=held))


def _only_deltas(frame: Frame) -> bool:
    return all(event.HasField("delta") for event in frame)


GenerateContext = grpc.aio.ServicerContext[
    generation_service_pb2.GenerateRequest, generation_service_pb2.GenerateResponse
]


class GenerationServicer(generation_service_pb2_grpc.GenerationServiceServicer):
    """See GenerationService."""

    def __init__(self, desk: RequestAdmission, chats: Mapping[str, ChatSetup]) -> None:
        """`chats`: the common setup of all conversations with a model, by its name."""
        self._desk = desk
        self._chats = chats

    async def Generate(  # type: ignore[override]  # noqa: N802 - the rpc's name; a coroutine that writes
        self, request: generation_service_pb2.GenerateRequest, context: GenerateContext
    ) -> None:
        """Generate an answer.

        It writes and does not yield: a fault that ends the request while its caller is slow to read must end it inside
        the block of `admit`, and so with its reason. gRPC would drop a generator there without a status.
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

    def __init__(self, desk: RequestAdmission) -> None:
        self._desk = desk

    @override
    async def Embed(
        self,
        request: embedding_service_pb2.EmbedRequest,
        context: grpc.aio.ServicerContext[embedding_service_pb2.EmbedRequest, embedding_service_pb2.EmbedResponse],
    ) -> embedding_service_pb2.EmbedResponse:
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


def _payload(request: generation_service_pb2.GenerateRequest) -> Any:
    kind = request.WhichOneof("payload")
    if kind is None:
        raise invalid_field("payload", "must be set")
    return getattr(request, kind)


MAX_SPEECH_MESSAGE_BYTES = 256 * 1024
Context = grpc.aio.ServicerContext[Any, Any]


class ModelCallServicer(model_call_service_pb2_grpc.ModelCallServiceServicer):
    """See ModelCallService."""

    def __init__(self, desk: RequestAdmission) -> None:
        self._desk = desk

    @override
    async def Rerank(self, request: pb.RerankRequest, context: Context) -> pb.RerankResponse:
        async with answering(context):
            permit, instance = self._desk.admit(request.ticket)
            if not request.payload.documents:
                raise invalid_field("payload.documents", "must not be empty")
            call = call_info(permit, context)
            with self._working(permit, instance, request, call) as work:
                result = await work.rerank(request.payload, call)
            response = pb.RerankResponse(scores=result.scores)
            response.receipt.usage.CopyFrom(result.usage)
            self._desk.complete(response.receipt, permit, instance)
            return response
        raise AssertionError("abort has raised")

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:  # noqa: N802
        """Count the tokens of a text or a chat. The receipt counts none: the engine computes nothing."""
        async with answering(context):
            permit, instance = self._desk.admit(request.ticket)
            if request.payload.WhichOneof("kind") is None:
                raise invalid_field("payload", "must have a text or a chat")
            call = call_info(permit, context)
            with self._working(permit, instance, request, call, takes_slot=False) as work:
                result = await work.tokenize(request.payload, call)
            result.max_context_tokens = result.max_context_tokens or instance.loader.context_tokens
            response = pb.TokenizeResponse(result=result)
            self._desk.complete(response.receipt, permit, instance)
            return response
        raise AssertionError("abort has raised")

    @override
    async def GenerateImages(self, request: pb.GenerateImagesRequest, context: Context) -> pb.GenerateImagesResponse:
        async with answering(context):
            permit, instance = self._desk.admit(request.ticket)
            call = call_info(permit, context)
            with self._working(permit, instance, request, call) as work:
                result = await work.generate_images(request.payload, call)
            response = pb.GenerateImagesResponse(images=result.images)
            response.receipt.usage.CopyFrom(result.usage)
            self._desk.complete(response.receipt, permit, instance)
            return response
        raise AssertionError("abort has raised")

    @override
    async def Transcribe(self, request: pb.TranscribeRequest, context: Context) -> pb.TranscribeResponse:
        async with answering(context):
            permit, instance = self._desk.admit(request.ticket)
            if not request.payload.audio.data:
                raise invalid_field("payload.audio", "must not be empty")
            call = call_info(permit, context)
            with self._working(permit, instance, request, call) as work:
                transcription = await work.transcribe(request.payload, call)
            response = pb.TranscribeResponse(transcription=transcription)
            self._desk.complete(response.receipt, permit, instance)
            return response
        raise AssertionError("abort has raised")

    async def Speak(  # type: ignore[override]  # noqa: N802 - the rpc's name; a coroutine that writes
        self, request: pb.SpeakRequest, context: Context
    ) -> None:
        """Synthesize speech. It writes and does not yield, for the reason given in GenerationServicer.Generate."""
        async with answering(context):
            permit, instance = self._desk.admit(request.ticket)
            call, told = call_info(permit, context), ""
            with self._working(permit, instance, request, call) as work:
                async with aclosing(work.speak(request.payload, call)) as parts:
                    async for part in parts:
                        for start in range(0, len(part.data), MAX_SPEECH_MESSAGE_BYTES):
                            piece = part.data[start : start + MAX_SPEECH_MESSAGE_BYTES]
                            media_type = "" if told else part.media_type
                            told = part.media_type
                            await context.write(pb.SpeakResponse(data=piece, media_type=media_type))
                work.record.answered = True
                receipt = receipt_pb2.Receipt()
                self._desk.complete(receipt, permit, instance)
                await context.write(pb.SpeakResponse(receipt=receipt))

    @contextmanager
    def _working(
        self, permit: Permit, instance: Instance, request: Any, call: CallInfo, *, takes_slot: bool = True
    ) -> Iterator[AdmittedRequest]:
        """`RequestAdmission.hold`, with a log line for each failure in it."""
        with self._desk.hold(permit, instance, request.options, takes_slot=takes_slot) as work:
            try:
                yield work
            except WeftError as error:
                log_failure(call, instance, error)
                raise
