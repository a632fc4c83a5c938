"""Sinks of generated tokens: an SSE stream in large writes, or one JSON object at the end."""

import asyncio
from collections.abc import Mapping
from typing import Any

from aiohttp import web
from typing_extensions import override

from weft_testing.fake_backend import openai_shapes as shapes
from weft_testing.fake_backend.answers import Piece, PieceKind
from weft_testing.fake_backend.requests import GenerationRequest

MAX_WRITE_BYTES = 16 * 1024
SERVER_HEADER = {"Server": "llama.cpp"}
STREAM_HEADERS = {**SERVER_HEADER, "X-Accel-Buffering": "no", "Content-Type": "text/event-stream"}


class Sink:
    """Receives the tokens of a request; this one sends one JSON object at the end. `index` is the choice."""

    def __init__(self, request: GenerationRequest, envelope: shapes.Envelope, count: int) -> None:
        self._request = request
        self._envelope = envelope
        self._pieces: list[list[Piece]] = [[] for _ in range(count)]
        self._logprobs: list[list[Mapping[str, Any]]] = [[] for _ in range(count)]
        self._reasons: list[str | None] = [None] * count
        self._first_tally: shapes.ChoiceTally | None = None

    def start(self, index: int) -> None:
        """Begins a choice."""

    def progress(self, progress: Mapping[str, Any]) -> None:
        """Reports prefill progress."""

    def piece(self, index: int, piece: Piece, logprobs: Mapping[str, Any] | None) -> None:
        """Adds a token."""
        self._pieces[index].append(piece)
        if logprobs is not None:
            self._logprobs[index].append(logprobs)

    def finish(self, index: int, reason: str | None, tally: shapes.ChoiceTally) -> None:
        """Ends a choice; without a reason, the client gets no event. `tally`: its token counts and times."""
        self._reasons[index] = reason
        if index == 0:
            self._first_tally = tally

    async def keepalive(self) -> None:
        """Sends a keep-alive comment if the answer is a stream."""

    async def flush(self) -> None:
        """Sends the buffer."""

    async def flush_when_full(self) -> None:
        """Sends the buffer once it is large enough."""

    async def end(self) -> web.StreamResponse:
        """Completes the answer."""
        assert self._first_tally is not None
        choices = [self._choice(index) for index in range(len(self._pieces))]
        return json_response(shapes.unary_body(self._envelope, choices, self._first_tally))

    def _choice(self, index: int) -> dict[str, Any]:
        pieces, logprobs = self._pieces[index], self._logprobs[index]
        text = "".join(piece.text for piece in pieces if piece.kind is PieceKind.CONTENT)
        reason = self._reasons[index]
        if not self._request.is_chat:
            content = {"content": logprobs} if logprobs else None
            return {"text": text, "index": index, "logprobs": content, "finish_reason": reason}
        choice = {"finish_reason": reason, "index": index, "message": shapes.chat_message(pieces, text)}
        return {**choice, "logprobs": {"content": logprobs}} if logprobs else choice


class StreamSink(Sink):
    """An SSE stream. Headers are sent with the first bytes, as in llama-server."""

    def __init__(
        self, http: web.BaseRequest, request: GenerationRequest, envelope: shapes.Envelope, count: int
    ) -> None:
        super().__init__(request, envelope, count)
        self._http = http
        self._include_usage = request.include_usage
        kind = shapes.ChatChunks if request.is_chat else shapes.CompletionChunks
        self._chunks = kind(envelope, count)
        self._buffer = bytearray(shapes.SSE_NULL if len(request.prompts) > 1 else b"")
        self._response = web.StreamResponse(headers=STREAM_HEADERS)

    @override
    def start(self, index: int) -> None:
        self._buffer += self._chunks.start(index)

    @override
    def progress(self, progress: Mapping[str, Any]) -> None:
        self._buffer += self._chunks.progress(progress)

    @override
    def piece(self, index: int, piece: Piece, logprobs: Mapping[str, Any] | None) -> None:
        self._buffer += self._chunks.piece(index, piece, logprobs)

    @override
    def finish(self, index: int, reason: str | None, tally: shapes.ChoiceTally) -> None:
        if reason is not None:
            self._buffer += self._chunks.finish(index, reason, tally, include_usage=self._include_usage)

    @override
    async def keepalive(self) -> None:
        self._buffer += shapes.SSE_COMMENT
        await self.flush()

    @override
    async def flush(self) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._http)
        if self._buffer:
            data, self._buffer = self._buffer, bytearray()
            await self._response.write(data)

    @override
    async def flush_when_full(self) -> None:
        if len(self._buffer) >= MAX_WRITE_BYTES:
            await self.flush()
            # A write to a socket with buffer space never yields, so let other requests run.
            await asyncio.sleep(0)

    @override
    async def end(self) -> web.StreamResponse:
        self._buffer += shapes.SSE_DONE
        await self.flush()
        await self._response.write_eof()
        return self._response


def json_response(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Returns a JSON answer with llama-server's headers."""
    return web.Response(
        body=body,
        status=status,
        headers={**SERVER_HEADER, "Content-Type": "application/json; charset=utf-8", **(headers or {})},
    )
