"""Generation and embeddings over an OpenAI-compatible HTTP server, with every way it can fail named."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Self

import aiohttp
import msgspec
from yarl import URL

from runner_svc.backends.openai_request import (
    chat_body,
    choices_per_prompt,
    completion_body,
    embedding_body,
    expected_choices,
)
from runner_svc.backends.openai_stream import StreamReader, error_fields
from runner_svc.backends.port import CallInfo, EmbeddingResult
from runner_svc.backends.sse import SseDecoder
from weft.api.common.v1 import chat_pb2, embedding_pb2, usage_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.telemetry import TRACEPARENT

HEALTH = "/health"
MODELS = "/v1/models"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a server is and what it wants to hear."""

    base_url: str = field(repr=False)
    """Without a slash at its end, and without /v1."""
    api_key: str = field(default="", repr=False)
    """Empty: no Authorization header is sent."""
    model: str = ""
    """The server's own name of the model; empty: requests name none."""


ExplainBreak = Callable[[Reason], Awaitable[WeftError | None]]
"""Asked why a connection broke, with what it looked like: the supervisor may know more ("the process was killed")."""


class OpenAiHttp:
    """One server behind one aiohttp session."""

    def __init__(self, endpoint: Endpoint, timeouts: HttpTimeouts, explain_break: ExplainBreak) -> None:
        self._timeouts = timeouts
        self._explain_break = explain_break
        self._model = endpoint.model
        paths = (HEALTH, MODELS, CHAT, COMPLETIONS, EMBEDDINGS)
        self._urls = {path: URL(endpoint.base_url + path) for path in paths}
        self.chunks_received = 0
        """Parts of answers so far: while they come the server is alive, whatever a probe says."""
        # The runner's slots bound the number of connections.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_seconds),
            headers={"Content-Type": "application/json", **_authorization(endpoint.api_key)},
            auto_decompress=False,
        )
        self._encoder = msgspec.json.Encoder()

    async def close(self) -> None:
        """Close every connection; whatever the server does for them, it is told to stop."""
        await self._session.close()

    async def healthy(self, timeout_seconds: float) -> bool:
        """Whether GET /health says 200."""
        return await self.status_of(HEALTH, timeout_seconds) == 200

    async def status_of(self, path: str, timeout_seconds: float) -> int | None:
        """The status that GET `path` (HEALTH or MODELS) is answered with; None: no answer."""
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_seconds)
            async with self._session.get(self._urls[path], timeout=timeout, allow_redirects=False) as response:
                return response.status
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        """See Backend.generate."""
        if isinstance(payload, chat_pb2.ChatPayload):
            path, body = CHAT, chat_body(payload, self._model)
        else:
            path, body = COMPLETIONS, completion_body(payload, self._model)
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
        async with self._post(EMBEDDINGS, embedding_body(payload, self._model), call) as response:
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
                posting = self._session.post(self._urls[path], data=data, headers=headers, allow_redirects=False)
                if self._timeouts.headers_seconds is None:
                    return await posting
                async with asyncio.timeout(self._timeouts.headers_seconds):
                    return await posting
            except RuntimeError as error:
                # aiohttp's word for a session that `close` has closed, here or before the second try.
                if not self._session.closed:
                    raise
                raise await self._stopped() from error
            except aiohttp.ClientError as error:
                if last_try or isinstance(error, aiohttp.ClientConnectorError):
                    raise await self._broken(Reason.CONNECT_FAILED, "the backend closed the connection") from error
            except TimeoutError as error:
                raise WeftError(Reason.HEADERS_TIMEOUT, "the backend sent no response headers in time") from error
        raise AssertionError("the second try returns or raises")

    async def _chunks(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """Whatever has arrived, each time; STALL_TIMEOUT when only comments or nothing comes for too long."""
        content = response.content
        with _StallGuard(self._timeouts.idle_stream_seconds, response.close) as guard:
            while True:
                try:
                    chunk = await content.readany()
                except (RuntimeError, aiohttp.ClientError) as error:
                    if guard.fired:
                        raise WeftError(
                            Reason.STALL_TIMEOUT,
                            f"the backend sent nothing for {self._timeouts.idle_stream_seconds:g} s in mid-answer",
                        ) from error
                    # RuntimeError is aiohttp's word for a read on a connection that `close` has closed.
                    if isinstance(error, RuntimeError) and self._session.closed:
                        raise await self._stopped() from error
                    raise
                if not chunk:
                    return
                self.chunks_received += 1
                if b"data:" in chunk:
                    guard.event_seen()
                yield chunk

    async def _stopped(self) -> WeftError:
        return await self._broken(Reason.WORKER_RESTARTED, "the backend was stopped while it worked on the request")

    async def _broken(self, reason: Reason, message: str) -> WeftError:
        return await self._explain_break(reason) or WeftError(reason, message)


class _StallGuard:
    """Calls `give_up` when no event was seen for a while; starts with the first event.

    One timer that looks back when it is due, instead of one that is set anew for every event of every stream.
    """

    def __init__(self, limit_seconds: float, give_up: Callable[[], None]) -> None:
        self._limit_seconds = limit_seconds
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._last_event_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.fired = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def event_seen(self) -> None:
        """The backend is alive."""
        self._last_event_at = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._limit_seconds, self._look)

    def _look(self) -> None:
        due = self._last_event_at + self._limit_seconds
        if self._loop.time() >= due:
            self.fired = True
            self._give_up()
        else:
            self._timer = self._loop.call_at(due, self._look)


class _EmbeddingItem(msgspec.Struct):
    embedding: list[float]
    index: int = 0


class _EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int = 0


class _EmbeddingReply(msgspec.Struct):
    data: list[_EmbeddingItem]
    usage: _EmbeddingUsage


def _authorization(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


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
    return WeftError(Reason.BACKEND_REJECTED if 400 <= status < 500 else Reason.BACKEND_ERROR, text)
