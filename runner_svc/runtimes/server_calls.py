"""Calls of backends with an OpenAI-compatible server, whether the runner starts it or not."""

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import TypeVar

from typing_extensions import override

from runner_svc.backend.port import Backend, CallInfo, EmbeddingResult, RerankResult, SpeechPart
from runner_svc.openai_upstream import media
from runner_svc.openai_upstream.client import OpenAiHttp
from runner_svc.openai_upstream.tokens import tokenize
from weft.api.common.v1 import audio_pb2, embedding_pb2, image_pb2, rerank_pb2, tokenize_pb2
from weft.dispatch.frames import Frame
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation

_Payload = TypeVar("_Payload")
_Part = TypeVar("_Part")


class ServerCalls(Backend):
    """A Backend whose operations other than generations are calls of its server."""

    operations: frozenset[Operation]

    def _running(self) -> OpenAiHttp:
        """Returns the server. Raises BACKEND_NOT_READY if it is not running."""
        raise NotImplementedError

    @contextmanager
    def _asking(self, operation: Operation, call: CallInfo) -> Iterator[tuple[OpenAiHttp, CallInfo]]:
        """Yields the server and the call for it. Raises UNSUPPORTED_OPERATION, BACKEND_NOT_READY."""
        if operation not in self.operations:
            message = f"this model is not configured for the operation {operation.name.lower()}"
            raise WeftError(Reason.UNSUPPORTED_OPERATION, message)
        yield self._running(), call

    @override
    async def embed(self, payload: embedding_pb2.EmbeddingPayload, call: CallInfo) -> EmbeddingResult:
        with self._asking(Operation.EMBEDDING, call) as (http, asked):
            return await http.embed(payload, asked)

    @override
    async def rerank(self, payload: rerank_pb2.RerankPayload, call: CallInfo) -> RerankResult:
        with self._asking(Operation.RERANK, call) as (http, asked):
            return await http.rerank(payload, asked)

    @override
    async def tokenize(self, payload: tokenize_pb2.TokenizePayload, call: CallInfo) -> tokenize_pb2.TokenizeResult:
        with self._asking(Operation.TOKENIZE, call) as (http, asked):
            return await tokenize(http, payload, asked)

    @override
    def generate_images(self, payload: image_pb2.ImagePayload, call: CallInfo) -> AsyncGenerator[Frame]:
        return self._streamed(Operation.IMAGE, media.generate_images, payload, call)

    @override
    def transcribe(self, payload: audio_pb2.TranscriptionPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        return self._streamed(Operation.TRANSCRIPTION, media.transcribe, payload, call)

    @override
    def speak(self, payload: audio_pb2.SpeechPayload, call: CallInfo) -> AsyncGenerator[SpeechPart]:
        return self._streamed(Operation.SPEECH, media.speak, payload, call)

    async def _streamed(
        self,
        operation: Operation,
        ask: Callable[[OpenAiHttp, _Payload, CallInfo], AsyncGenerator[_Part]],
        payload: _Payload,
        call: CallInfo,
    ) -> AsyncGenerator[_Part]:
        with self._asking(operation, call) as (http, asked):
            async with aclosing(ask(http, payload, asked)) as parts:
                async for part in parts:
                    yield part


async def require_done(http: OpenAiHttp, path: str, timeout_seconds: float, body: bytes = b"{}") -> bytes:
    """Returns the response to POST `path`. Raises WeftError for a status other than 200."""
    status, answer = await http.call_route("POST", path, timeout_seconds, body)
    if status != 200:
        raise WeftError(Reason.BACKEND_ERROR, f"the engine answered {path.partition('?')[0]} with status {status}")
    return answer
