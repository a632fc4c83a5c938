"""InferenceService: the public gRPC API, over the same dispatcher as the HTTP edge. Translation only."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
from typing_extensions import override

from router_svc.request_validation import (
    check_chat,
    check_completion,
    check_embedding,
    check_images,
    check_rerank,
    check_speech,
    check_tokenize,
    check_transcription,
    metadata_of,
    tenant_of,
)
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import inference_service_pb2 as pb
from weft.api.router.v1 import inference_service_pb2_grpc
from weft.dispatch.agents import require_model_name
from weft.dispatch.dispatcher import Dispatcher, UnaryCall
from weft.dispatch.frames import Frame, GenerationPayload
from weft.dispatch.parameter_checks import client_of, handling_of, priority_of, session_of
from weft.dispatch.request_trace import RequestContext
from weft.kernel.json_schema import SchemaLimits
from weft.kernel.names import (
    MAX_REQUEST_ID_CHARS,
    new_id,
    require_token,
)
from weft.kernel.principal import MAY_LEAVE
from weft.kernel.request import Operation
from weft.kernel.rpc import answering
from weft.kernel.rpc_auth import caller
from weft.kernel.telemetry import traceparent_of

REQUEST_ID = "x-request-id"
RECEIPT_TRAILER = "weft-receipt-bin"

Context = grpc.aio.ServicerContext[Any, Any]
ResultT = TypeVar("ResultT")
InferenceRequest = (
    pb.ChatRequest
    | pb.CompleteRequest
    | pb.EmbedRequest
    | pb.RerankRequest
    | pb.TokenizeRequest
    | pb.GenerateImagesRequest
    | pb.TranscribeRequest
    | pb.SpeakRequest
)


class InferenceServicer(inference_service_pb2_grpc.InferenceServiceServicer):
    """Implements InferenceService; translation only."""

    def __init__(self, dispatcher: Dispatcher, default_timeout_seconds: float, schemas: SchemaLimits) -> None:
        self._dispatcher = dispatcher
        self._default_timeout_seconds = default_timeout_seconds
        self._schemas = schemas

    @override
    async def Chat(self, request: pb.ChatRequest, context: Context) -> AsyncGenerator[pb.ChatResponse]:
        async with answering(context):
            ctx = await self._context_of(request, Operation.CHAT, context)
            check_chat(request.payload, self._schemas)
            async with aclosing(self._generate(ctx, request.payload, context)) as frames:
                async for frame in frames:
                    yield pb.ChatResponse(events=frame)

    @override
    async def Complete(self, request: pb.CompleteRequest, context: Context) -> AsyncGenerator[pb.CompleteResponse]:
        async with answering(context):
            ctx = await self._context_of(request, Operation.COMPLETION, context)
            check_completion(request.payload)
            async with aclosing(self._generate(ctx, request.payload, context)) as frames:
                async for frame in frames:
                    yield pb.CompleteResponse(events=frame)

    @override
    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        async with answering(context):
            ctx = await self._context_of(request, Operation.EMBEDDING, context)
            check_embedding(request.payload)
            call = self._dispatcher.embed(ctx, request.payload)
            embeddings = await _result_of(call, context)
            return pb.EmbedResponse(embeddings=embeddings, receipt=call.receipt)
        raise AssertionError("abort has raised")

    @override
    async def Rerank(self, request: pb.RerankRequest, context: Context) -> pb.RerankResponse:
        async with answering(context):
            ctx = await self._context_of(request, Operation.RERANK, context)
            check_rerank(request.payload)
            call = self._dispatcher.rerank(ctx, request.payload)
            scores = await _result_of(call, context)
            return pb.RerankResponse(scores=scores, receipt=call.receipt)
        raise AssertionError("abort has raised")

    @override
    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with answering(context):
            ctx = await self._context_of(request, Operation.TOKENIZE, context)
            check_tokenize(request.payload, self._schemas)
            call = self._dispatcher.tokenize(ctx, request.payload)
            result = await _result_of(call, context)
            return pb.TokenizeResponse(result=result, receipt=call.receipt)
        raise AssertionError("abort has raised")

    @override
    async def GenerateImages(self, request: pb.GenerateImagesRequest, context: Context) -> pb.GenerateImagesResponse:
        async with answering(context):
            ctx = await self._context_of(request, Operation.IMAGE, context)
            check_images(request.payload)
            call = self._dispatcher.generate_images(ctx, request.payload)
            images = await _result_of(call, context)
            return pb.GenerateImagesResponse(images=images, receipt=call.receipt)
        raise AssertionError("abort has raised")

    @override
    async def Transcribe(self, request: pb.TranscribeRequest, context: Context) -> pb.TranscribeResponse:
        async with answering(context):
            ctx = await self._context_of(request, Operation.TRANSCRIPTION, context)
            check_transcription(request.payload)
            call = self._dispatcher.transcribe(ctx, request.payload)
            transcription = await _result_of(call, context)
            return pb.TranscribeResponse(transcription=transcription, receipt=call.receipt)
        raise AssertionError("abort has raised")

    @override
    async def Speak(self, request: pb.SpeakRequest, context: Context) -> AsyncGenerator[pb.SpeakResponse]:
        async with answering(context):
            ctx = await self._context_of(request, Operation.SPEECH, context)
            check_speech(request.payload)
            call = self._dispatcher.speak(ctx, request.payload)
            try:
                async with aclosing(call.pieces()) as pieces:
                    async for piece in pieces:
                        yield pb.SpeakResponse(data=piece.data, media_type=piece.media_type)
                yield pb.SpeakResponse(receipt=call.receipt)
            finally:
                _send_receipt(context, call)

    async def _generate(
        self, ctx: RequestContext, payload: GenerationPayload, context: Context
    ) -> AsyncGenerator[Frame]:
        call = self._dispatcher.generate(ctx, payload)
        try:
            async with aclosing(call.frames()) as frames:
                async for frame in frames:
                    yield frame
        finally:
            _send_receipt(context, call)

    async def _context_of(self, request: InferenceRequest, operation: Operation, context: Context) -> RequestContext:
        metadata = metadata_of(context)
        request_id = metadata.get(REQUEST_ID) or new_id("req")
        require_token(request_id, REQUEST_ID, MAX_REQUEST_ID_CHARS)
        if request.options.allow_remote:
            caller().require(MAY_LEAVE)
        await context.send_initial_metadata(((REQUEST_ID, request_id),))
        return RequestContext(
            request_id=request_id,
            tenant=tenant_of(metadata),
            caller=caller().name,
            model=require_model_name(request.model, "model"),
            operation=operation,
            traceparent=traceparent_of(metadata),
            priority=priority_of(request.options),
            names_priority=request.options.priority != 0,
            allow_remote=request.options.allow_remote,
            timeout_seconds=context.time_remaining() or self._default_timeout_seconds,
            handling=handling_of(request.options),
            client_id=client_of(request.options),
            session=session_of(request.options),
        )


async def _result_of(call: UnaryCall[ResultT], context: Context) -> ResultT:
    try:
        return await call.result()
    finally:
        _send_receipt(context, call)


def _send_receipt(context: Context, call: Any) -> None:
    if call.receipt is not None:
        trailer = receipt_pb2.Receipt()
        trailer.CopyFrom(call.receipt)
        # Metadata has little room, and too much of it would cost the caller the whole answer. Both are in the stream.
        trailer.ClearField("signals")
        trailer.ClearField("warnings")
        context.set_trailing_metadata(((RECEIPT_TRAILER, trailer.SerializeToString()),))
