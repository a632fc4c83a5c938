"""Generation and embeddings over an OpenAI-compatible HTTP server, with every way it can fail named."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import aiohttp
import msgspec

from runner_svc.backends.openai_request import (
    chat_body,
    choices_per_prompt,
    completion_body,
    embedding_body,
    expected_choices,
)
from runner_svc.backends.openai_stream import StreamReader, error_fields
from runner_svc.backends.port import CallInfo, EmbeddingResult, Frame, GenerationPayload
from runner_svc.backends.sse import SseDecoder
from weft.api.common.v1 import chat_pb2, embedding_pb2, usage_pb2
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.telemetry import TRACEPARENT

MAX_ERROR_BODY_BYTES = 64 * 1024
MAX_EMBEDDING_BODY_BYTES = 256 * 1024 * 1024
DRAIN_SECONDS = 1.0
IDLE_CONNECTION_SECONDS = 3.0
"""llama-server closes an idle connection after 5 s; ours must be given up first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpTimeouts:
    """How long to wait for what. There is no total limit: a long answer is not a fault."""

    connect_seconds: float = 5.0
    headers_seconds: float | None = None
    """None where the server sends headers with the first token: a limit would kill a long prefill."""
    idle_stream_seconds: float = 120.0
    """Longest silence between two events once content has begun. Comments are bytes, not progress."""


class OpenAiHttp:
    """One server behind one aiohttp session.

    `explain_break` is asked why a connection broke, since the supervisor may know more ("the process was killed").
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        timeouts: HttpTimeouts,
        explain_break: Callable[[], Awaitable[WeftError | None]],
    ) -> None:
        self._timeouts = timeouts
        self._explain_break = explain_break
        # The runner's slots bound the number of connections.
        self._session = aiohttp.ClientSession(
            base_url=base_url,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_seconds),
            headers={"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
            auto_decompress=False,
        )
        self._encoder = msgspec.json.Encoder()

    async def close(self) -> None:
        """Close every connection; whatever the server does for them, it is told to stop."""
        await self._session.close()

    async def healthy(self, timeout_seconds: float) -> bool:
        """Whether GET /health says 200."""
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_seconds)
            async with self._session.get("/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        """See Backend.generate."""
        if isinstance(payload, chat_pb2.ChatPayload):
            path, body = "/v1/chat/completions", chat_body(payload)
        else:
            path, body = "/v1/completions", completion_body(payload)
        reader = StreamReader(expected_choices(payload), choices_per_prompt(payload))
        decoder = SseDecoder()
        async with self._post(path, body, call) as response:
            _require_content_type(response, "text/event-stream")
            async for chunk in self._chunks(response):
                for frame in reader.read(decoder.feed(chunk)):
                    yield frame
                if reader.done:
                    break
            yield reader.finish()
            await _drain(response)

    async def embed(self, payload: embedding_pb2.EmbeddingPayload, call: CallInfo) -> EmbeddingResult:
        """See Backend.embed."""
        async with self._post("/v1/embeddings", embedding_body(payload), call) as response:
            _require_content_type(response, "application/json")
            raw = await _read_bounded(response, MAX_EMBEDDING_BODY_BYTES)
        try:
            reply = msgspec.json.decode(raw, type=_EmbeddingReply)
        except msgspec.DecodeError as error:
            raise WeftError(
                Reason.BACKEND_PROTOCOL_ERROR, f"the backend's embeddings are malformed: {error}"
            ) from error
        if len(reply.data) != len(payload.inputs):
            raise WeftError(
                Reason.BACKEND_PROTOCOL_ERROR,
                f"the backend sent {len(reply.data)} vectors for {len(payload.inputs)} inputs",
            )
        vectors = [embedding_pb2.Embedding(index=item.index, values=item.embedding) for item in reply.data]
        vectors.sort(key=lambda vector: vector.index)
        return EmbeddingResult(embeddings=vectors, usage=usage_pb2.Usage(prompt_tokens=reply.usage.prompt_tokens))

    @asynccontextmanager
    async def _post(self, path: str, body: object, call: CallInfo) -> AsyncIterator[aiohttp.ClientResponse]:
        """A 200 response to a POST; every other end is a WeftError. Leaving early closes the connection."""
        response = await self._send(path, body, call)
        try:
            if response.status != 200:
                raise _refusal(response.status, await _read_bounded(response, MAX_ERROR_BODY_BYTES))
            yield response
        except aiohttp.ClientError as error:
            raise await self._broken(
                Reason.BACKEND_PROTOCOL_ERROR, "the backend broke the connection in mid-answer"
            ) from error
        finally:
            # A connection that was read to its end goes back to the pool; any other is closed, which cancels the work.
            response.release() if response.content.at_eof() else response.close()

    async def _send(self, path: str, body: object, call: CallInfo) -> aiohttp.ClientResponse:
        headers = {"X-Request-Id": call.request_id, TRACEPARENT: call.traceparent}
        data = self._encoder.encode(body)
        # llama-server closes a connection after each stream while promising to keep it, so the one from the pool may
        # be dead on arrival: that is worth a second try on a new connection. A dead server fails the second as well.
        for last_try in (False, True):
            try:
                async with asyncio.timeout(self._timeouts.headers_seconds):
                    return await self._session.post(path, data=data, headers=headers)
            except aiohttp.ClientError as error:
                if last_try or isinstance(error, aiohttp.ClientConnectorError):
                    raise await self._broken(Reason.CONNECT_FAILED, "the backend closed the connection") from error
            except TimeoutError as error:
                raise WeftError(Reason.HEADERS_TIMEOUT, "the backend sent no response headers in time") from error
        raise AssertionError("the second try returns or raises")

    async def _chunks(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """Whatever has arrived, each time; STALL_TIMEOUT when only comments or nothing comes for too long."""
        content = response.content
        loop = asyncio.get_running_loop()
        last_event_at: float | None = None
        while True:
            deadline = None if last_event_at is None else last_event_at + self._timeouts.idle_stream_seconds
            try:
                async with asyncio.timeout_at(deadline):
                    chunk = await content.readany()
            except TimeoutError as error:
                raise WeftError(
                    Reason.STALL_TIMEOUT,
                    f"the backend sent nothing for {self._timeouts.idle_stream_seconds:.0f} s in mid-answer",
                ) from error
            except RuntimeError as error:
                # aiohttp's word for a read on a connection that `close` has closed.
                if not self._session.closed:
                    raise
                raise await self._broken(
                    Reason.WORKER_RESTARTED, "the backend was stopped while it worked on the request"
                ) from error
            if not chunk:
                return
            if b"data:" in chunk:
                last_event_at = loop.time()
            yield chunk

    async def _broken(self, reason: Reason, message: str) -> WeftError:
        return await self._explain_break() or WeftError(reason, message)


class _EmbeddingItem(msgspec.Struct):
    embedding: list[float]
    index: int = 0


class _EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int = 0


class _EmbeddingReply(msgspec.Struct):
    data: list[_EmbeddingItem]
    usage: _EmbeddingUsage


def _require_content_type(response: aiohttp.ClientResponse, expected: str) -> None:
    if response.content_type != expected:
        raise WeftError(
            Reason.BACKEND_PROTOCOL_ERROR, f"the backend answered with {response.content_type}, not {expected}"
        )


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read the end of a body that has said all it has to say, so that its connection can be used again."""
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while await response.content.readany():
                pass


async def _read_bounded(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit_bytes:
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, f"the backend's answer is over {limit_bytes} bytes")
    return bytes(body)


def _refusal(status: int, body: bytes) -> WeftError:
    message, kind = error_fields(body)
    text = f"the backend answered {status}: {message}"
    if kind == "exceed_context_size_error":
        return WeftError(Reason.CONTEXT_LENGTH_EXCEEDED, message)
    if kind == "not_supported_error" or status == 501:
        return WeftError(Reason.UNSUPPORTED_OPERATION, message)
    if status in (429, 503):
        return WeftError(Reason.BACKEND_NOT_READY, text)
    if status in (401, 403):
        return WeftError(Reason.BACKEND_ERROR, text)
    return WeftError(Reason.BACKEND_REJECTED if status < 500 else Reason.BACKEND_ERROR, text)
