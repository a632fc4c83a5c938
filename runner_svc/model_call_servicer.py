"""gRPC translation for what a runner does beside text and vectors: scores, tokens, images, transcriptions, speech."""

from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc

from runner_svc.backend.port import CallInfo
from runner_svc.instance import Instance
from runner_svc.servicer import WorkDesk, call_info, log_failure
from runner_svc.work import Work
from weft.api.common.v1 import receipt_pb2
from weft.api.runner.v1 import model_call_service_pb2 as pb
from weft.api.runner.v1 import model_call_service_pb2_grpc
from weft.dispatch.tickets import Permit
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.rpc import answering

MAX_SPEECH_MESSAGE_BYTES = 256 * 1024
Context = grpc.aio.ServicerContext[Any, Any]


class ModelCallServicer(model_call_service_pb2_grpc.ModelCallServiceServicer):
    """See ModelCallService."""

    def __init__(self, desk: WorkDesk) -> None:
        self._desk = desk

    async def Rerank(self, request: pb.RerankRequest, context: Context) -> pb.RerankResponse:  # noqa: N802
        """See ModelCallService.Rerank."""
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
        """See ModelCallService.Tokenize. Its receipt counts no tokens: none was worked on."""
        async with answering(context):
            permit, instance = self._desk.admit(request.ticket)
            if request.payload.WhichOneof("kind") is None:
                raise invalid_field("payload", "must have a text or a chat")
            call = call_info(permit, context)
            with self._working(permit, instance, request, call, takes_slot=False) as work:
                result = await work.tokenize(request.payload, call)
            result.max_context_tokens = result.max_context_tokens or instance.context_tokens
            response = pb.TokenizeResponse(result=result)
            self._desk.complete(response.receipt, permit, instance)
            return response
        raise AssertionError("abort has raised")

    async def GenerateImages(  # noqa: N802
        self, request: pb.GenerateImagesRequest, context: Context
    ) -> pb.GenerateImagesResponse:
        """See ModelCallService.GenerateImages."""
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

    async def Transcribe(self, request: pb.TranscribeRequest, context: Context) -> pb.TranscribeResponse:  # noqa: N802
        """See ModelCallService.Transcribe."""
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
        """See ModelCallService.Speak. It writes and does not yield, for the reason that GenerationServicer says."""
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
    ) -> Iterator[Work]:
        """`WorkDesk.hold`, with a line in the log for what fails in it."""
        with self._desk.hold(permit, instance, request.options, takes_slot=takes_slot) as work:
            try:
                yield work
            except WeftError as error:
                log_failure(call, instance, error)
                raise
