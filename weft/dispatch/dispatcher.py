"""Runs a request: gets a grant, calls the runner itself, fails over before the first content, writes the receipt.

The router decides and never sees a token; the frames of a runner pass through here unchanged. `request_call` has what
all kinds of requests share, and the streamed kinds; the unary kinds are here.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc

from weft.api.common.v1 import audio_pb2, embedding_pb2, image_pb2, rerank_pb2, tokenize_pb2
from weft.api.runner.v1 import (
    embedding_service_pb2,
    embedding_service_pb2_grpc,
    model_call_service_pb2,
    model_call_service_pb2_grpc,
)
from weft.dispatch.agents import require_chat
from weft.dispatch.fleet import FleetSource
from weft.dispatch.frames import GenerationPayload
from weft.dispatch.payload_description import Payload
from weft.dispatch.placement import Grant, PlacementPort
from weft.dispatch.reconnecting_placement import ReconnectConfig, ReconnectingPlacement
from weft.dispatch.request_call import (
    CallDeps,
    GenerationCall,
    RequestCall,
    SpeechCall,
    reported_error,
    require_cancelled,
    runner_error,
    ticket_of,
    waiting_event,
)
from weft.dispatch.request_trace import RequestContext
from weft.kernel.clock import Clock, SystemClock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import ChannelPool

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class UnaryMethod(Generic[ResultT]):
    """A unary method of a runner. Its request has a ticket, a payload and options; its response has a receipt."""

    request: Callable[..., Any]
    """Makes the request."""
    method: Callable[[grpc.aio.Channel], Any]
    """The method on a channel."""
    result: Callable[[Any], ResultT]
    """Extracts the caller's result from a response."""


EMBED: UnaryMethod[list[embedding_pb2.Embedding]] = UnaryMethod(
    embedding_service_pb2.EmbedRequest,
    lambda channel: embedding_service_pb2_grpc.EmbeddingServiceStub(channel).Embed,
    lambda response: list(response.embeddings),
)
RERANK: UnaryMethod[list[rerank_pb2.RerankScore]] = UnaryMethod(
    model_call_service_pb2.RerankRequest,
    lambda channel: model_call_service_pb2_grpc.ModelCallServiceStub(channel).Rerank,
    lambda response: list(response.scores),
)
TOKENIZE: UnaryMethod[tokenize_pb2.TokenizeResult] = UnaryMethod(
    model_call_service_pb2.TokenizeRequest,
    lambda channel: model_call_service_pb2_grpc.ModelCallServiceStub(channel).Tokenize,
    lambda response: response.result,
)
GENERATE_IMAGES: UnaryMethod[list[image_pb2.GeneratedImage]] = UnaryMethod(
    model_call_service_pb2.GenerateImagesRequest,
    lambda channel: model_call_service_pb2_grpc.ModelCallServiceStub(channel).GenerateImages,
    lambda response: list(response.images),
)
TRANSCRIBE: UnaryMethod[audio_pb2.Transcription] = UnaryMethod(
    model_call_service_pb2.TranscribeRequest,
    lambda channel: model_call_service_pb2_grpc.ModelCallServiceStub(channel).Transcribe,
    lambda response: response.transcription,
)


class UnaryCall(RequestCall, Generic[ResultT]):
    """A running unary request."""

    def __init__(
        self, tools: CallDeps, context: RequestContext, payload: Payload, method: UnaryMethod[ResultT]
    ) -> None:
        super().__init__(tools, context)
        self._payload = payload
        self._method = method

    async def result(self) -> ResultT:
        """The answer. Raises the WeftError that ended the request; cancelling it stops the runner's work."""
        try:
            require_chat(self._context)
            async with self._place(self._payload) as placement:
                try:
                    response = await self._attempts(placement)
                except Exception as error:
                    await self._report_failed(placement, error)
                    raise
                receipt = self._close(Reason.UNSPECIFIED, response.receipt)
                await placement.report_finished(Reason.UNSPECIFIED, receipt)
                return self._method.result(response)
        except Exception as error:
            self._close_failed(error)
            raise
        finally:
            self._close_left()

    async def _attempts(self, placement: ReconnectingPlacement) -> Any:
        last_error: WeftError | None = None
        while True:
            try:
                decision = await placement.next_decision()
            except WeftError as rejection:
                raise reported_error(rejection, last_error) from rejection
            now = self._tools.clock.monotonic()
            if not isinstance(decision, Grant):
                self._trace.note_waiting(decision, now)
                continue
            self._trace.note_grant(decision, now, remote=self._tools.may_leave(decision))
            try:
                return await self._attempt(decision)
            except WeftError as error:
                await self._fail_attempt(placement, decision, error)
                last_error = error

    async def _attempt(self, grant: Grant) -> Any:
        method = self._method
        channel = await self._tools.channels.get(grant.address)
        request = method.request(ticket=ticket_of(grant), payload=self._payload, options=self._options(grant))
        try:
            return await method.method(channel)(
                request, timeout=self._seconds_left(grant), metadata=self._metadata(grant)
            )
        except grpc.aio.AioRpcError as error:
            raise runner_error(error) from error
        except asyncio.CancelledError:
            require_cancelled()
            raise


EmbeddingCall = UnaryCall[list[embedding_pb2.Embedding]]


__all__ = ["Dispatcher", "EmbeddingCall", "GenerationCall", "SpeechCall", "UnaryCall", "waiting_event"]


class Dispatcher:
    """Turns requests into calls. One per process that has callers: each gateway, each router.

    A call starts when its frames or chunks are read, or its result is awaited.
    """

    def __init__(
        self,
        placement: PlacementPort,
        channels: ChannelPool,
        *,
        clock: Clock | None = None,
        steady: ReconnectConfig | None = None,
        fleet: FleetSource | None = None,
    ) -> None:
        """`fleet` knows the agents; without it there are none."""
        self._tools = CallDeps(placement, channels, clock or SystemClock(), steady or ReconnectConfig(), fleet)

    def generate(self, context: RequestContext, payload: GenerationPayload) -> GenerationCall:
        """A chat or text completion."""
        return GenerationCall(self._tools, context, payload)

    def embed(self, context: RequestContext, payload: embedding_pb2.EmbeddingPayload) -> EmbeddingCall:
        """Vectors, in input order."""
        return UnaryCall(self._tools, context, payload, EMBED)

    def rerank(
        self, context: RequestContext, payload: rerank_pb2.RerankPayload
    ) -> UnaryCall[list[rerank_pb2.RerankScore]]:
        """Scores of documents, the best first."""
        return UnaryCall(self._tools, context, payload, RERANK)

    def tokenize(
        self, context: RequestContext, payload: tokenize_pb2.TokenizePayload
    ) -> UnaryCall[tokenize_pb2.TokenizeResult]:
        """Tokens of a text or of a conversation."""
        return UnaryCall(self._tools, context, payload, TOKENIZE)

    def generate_images(
        self, context: RequestContext, payload: image_pb2.ImagePayload
    ) -> UnaryCall[list[image_pb2.GeneratedImage]]:
        """Images."""
        return UnaryCall(self._tools, context, payload, GENERATE_IMAGES)

    def transcribe(
        self, context: RequestContext, payload: audio_pb2.TranscriptionPayload
    ) -> UnaryCall[audio_pb2.Transcription]:
        """The text of a recording."""
        return UnaryCall(self._tools, context, payload, TRANSCRIBE)

    def speak(self, context: RequestContext, payload: audio_pb2.SpeechPayload) -> SpeechCall:
        """Speech for a text."""
        return SpeechCall(self._tools, context, payload)
