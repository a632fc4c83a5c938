"""Requests that are answered in one piece: embeddings, scores, tokens, images, transcriptions.

All alike but for their messages, which `UnaryMethod` names.
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
from weft.dispatch.description import Payload
from weft.dispatch.journey import RequestContext
from weft.dispatch.port import Grant
from weft.dispatch.request_call import CallTools, RequestCall, require_cancelled, runner_error, ticket_of, told_error
from weft.dispatch.steady import SteadyPlacement
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class UnaryMethod(Generic[ResultT]):
    """A unary method of a runner. Its request has a ticket, a payload and options; its response has a receipt."""

    request: Callable[..., Any]
    """Makes the request."""
    method: Callable[[grpc.aio.Channel], Any]
    """The method on a channel."""
    result: Callable[[Any], ResultT]
    """What the caller wants of a response."""


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
    """One such request under way."""

    def __init__(
        self, tools: CallTools, context: RequestContext, payload: Payload, method: UnaryMethod[ResultT]
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

    async def _attempts(self, placement: SteadyPlacement) -> Any:
        last_error: WeftError | None = None
        while True:
            try:
                decision = await placement.next_decision()
            except WeftError as rejection:
                raise told_error(rejection, last_error) from rejection
            now = self._tools.clock.monotonic()
            if not isinstance(decision, Grant):
                self._journey.note_waiting(decision, now)
                continue
            self._journey.note_grant(decision, now, remote=self._tools.may_leave(decision))
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
