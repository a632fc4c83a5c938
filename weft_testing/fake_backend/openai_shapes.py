"""The JSON that llama-server writes, field by field (its server-task.cpp), with hot parts pre-encoded."""

import itertools
import math
import secrets
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from weft_testing.fake_backend.answers import Piece, PieceKind
from weft_testing.fake_backend.requests import RequestError

VOCABULARY_TOKENS = 49_152
SSE_DONE = b"data: [DONE]\n\n"
SSE_COMMENT = b":\n\n"
SSE_NULL = b"data: null\n\n"
"""The first event of a completion stream with several prompts."""
HTML_PAGE = b"<!doctype html><html><body><h1>It works!</h1></body></html>\n"

encode = msgspec.json.encode


@dataclass(slots=True, kw_only=True)
class ChoiceTally:
    """Token counts and times of one choice so far; times in milliseconds."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int = 0
    prompt_ms: float = 0.0
    predicted_ms: float = 0.0

    def usage(self) -> dict[str, Any]:
        """The `usage` object."""
        return {
            "completion_tokens": self.completion_tokens,
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.completion_tokens + self.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def timings(self) -> dict[str, Any]:
        """The `timings` object."""
        return {
            "cache_n": self.cached_tokens,
            "prompt_n": self.prompt_tokens - self.cached_tokens,
            "prompt_ms": max(self.prompt_ms, 0.001),
            "predicted_n": self.completion_tokens,
            "predicted_ms": max(self.predicted_ms, 0.001),
        }

    def metrics(self) -> dict[str, Any]:
        """The `metrics` object of vLLM."""
        gaps = max(1, self.completion_tokens - 1)
        return {
            "time_to_first_token_ms": self.prompt_ms,
            "generation_time_ms": self.predicted_ms,
            "mean_itl_ms": self.predicted_ms / gaps,
        }


class Figures(Enum):
    """The times that a server reports with an answer's usage."""

    TIMINGS = "timings"
    """As llama-server."""
    METRICS = "metrics"
    """As vLLM with --enable-per-request-metrics."""
    NONE = "none"


def error_body(error: RequestError) -> bytes:
    """Returns the error object of a rejection."""
    facts: Mapping[str, Any] = error.facts
    return encode({"error": {"code": error.status, "message": error.message, "type": error.kind, **facts}})


def token_id(token: str | int) -> int:
    """Returns a stable id for any token."""
    return token if isinstance(token, int) else zlib.crc32(token.encode()) % VOCABULARY_TOKENS


def logprob_content(text: str, position: int, top_count: int) -> dict[str, Any]:
    """Returns an entry of `logprobs.content`: the token and its alternatives, most likely first."""
    logprob = math.log(0.9) - 0.01 * (position % 10)
    alternatives = [(text if rank == 0 else f"alt{rank}", logprob - rank) for rank in range(top_count)]
    return {
        **_token_logprob(text, logprob),
        "top_logprobs": [_token_logprob(token, value) for token, value in alternatives],
    }


def _token_logprob(text: str, logprob: float) -> dict[str, Any]:
    return {"id": token_id(text), "token": text, "bytes": list(text.encode()), "logprob": logprob}


class Envelope:
    """The fields shared by all objects of an answer."""

    def __init__(
        self,
        model: str,
        *,
        is_chat: bool,
        thinking_field: str = PieceKind.REASONING.value,
        figures: Figures = Figures.TIMINGS,
    ) -> None:
        self._figures = figures
        self.thinking_field = thinking_field
        self.created = int(time.time())
        self.id = "chatcmpl-" + secrets.token_urlsafe(24)
        self.model = model
        self.is_chat = is_chat

    def figures(self, tally: ChoiceTally) -> dict[str, Any]:
        """Returns the field with a choice's times; empty if the server reports none."""
        match self._figures:
            case Figures.TIMINGS:
                return {"timings": tally.timings()}
            case Figures.METRICS:
                return {"metrics": tally.metrics()}
            case Figures.NONE:
                return {}

    def members(self, *, streamed: bool) -> dict[str, Any]:
        """Returns these fields as JSON data."""
        chat_object = "chat.completion.chunk" if streamed else "chat.completion"
        return {
            "created": self.created,
            "id": self.id,
            "model": self.model,
            "object": chat_object if self.is_chat else "text_completion",
        }


class ChatChunks:
    """SSE events of a streamed chat. Only a token's text is encoded per event; the rest is precomputed."""

    def __init__(self, envelope: Envelope, choice_count: int) -> None:
        self._envelope = envelope
        self._members = envelope.members(streamed=True)
        self._thinking_field = envelope.thinking_field
        self._heads = [b'data: {"choices":[{"finish_reason":null,"index":%d,"delta":' % n for n in range(choice_count)]
        self._tail = b"}]," + encode(self._members)[1:] + b"\n\n"
        self._content_heads = [head + b'{"content":' for head in self._heads]
        self._content_tail = b"}" + self._tail

    def start(self, index: int) -> bytes:
        """Returns the role preamble before a choice's first token."""
        return self._heads[index] + b'{"role":"assistant","content":null}' + self._tail

    def progress(self, progress: Mapping[str, Any]) -> bytes:
        """Returns a prefill report in a role preamble."""
        return self.start(0)[:-3] + b',"prompt_progress":' + encode(progress) + b"}\n\n"

    def piece(self, index: int, piece: Piece, logprobs: Mapping[str, Any] | None) -> bytes:
        """Returns a token's event."""
        if logprobs is None and piece.kind is PieceKind.CONTENT:
            return self._content_heads[index] + encode(piece.text) + self._content_tail
        logprobs_member = b"" if logprobs is None else b',"logprobs":' + encode({"content": [logprobs]})
        is_thinking = piece.kind is PieceKind.REASONING
        delta = {self._thinking_field: piece.text} if is_thinking else _delta(piece)
        return self._heads[index] + encode(delta) + logprobs_member + self._tail

    def finish(self, index: int, reason: str, tally: ChoiceTally, *, include_usage: bool) -> bytes:
        """Returns the end of a choice, with timings in its last event."""
        end: dict[str, Any] = {"choices": [{"finish_reason": reason, "index": index, "delta": {}}], **self._members}
        if not include_usage:
            return _sse({**end, **self._envelope.figures(tally)})
        usage = {"choices": [], **self._members, "usage": tally.usage(), **self._envelope.figures(tally)}
        return _sse(end) + _sse(usage)


class CompletionChunks:
    """SSE events of a streamed text completion."""

    def __init__(self, envelope: Envelope, choice_count: int) -> None:
        self._envelope = envelope
        self._members = envelope.members(streamed=True)
        self._middles = [b',"index":%d,"logprobs":' % number for number in range(choice_count)]
        self._tail = b',"finish_reason":null}],' + encode(self._members)[1:] + b"\n\n"

    def start(self, index: int) -> bytes:
        """Returns nothing: a completion has no preamble."""
        del index
        return b""

    def progress(self, progress: Mapping[str, Any]) -> bytes:
        """Returns a prefill report with an empty text."""
        return self.text(0, "")[:-3] + b',"prompt_progress":' + encode(progress) + b"}\n\n"

    def piece(self, index: int, piece: Piece, logprobs: Mapping[str, Any] | None) -> bytes:
        """Returns a token's event."""
        if logprobs is None:
            return self.text(index, piece.text)
        content = encode({"content": [logprobs]})
        return b'data: {"choices":[{"text":' + encode(piece.text) + self._middles[index] + content + self._tail

    def text(self, index: int, text: str) -> bytes:
        """Returns text without log probabilities."""
        return b'data: {"choices":[{"text":' + encode(text) + self._middles[index] + b"null" + self._tail

    def finish(self, index: int, reason: str, tally: ChoiceTally, *, include_usage: bool) -> bytes:
        """Returns the end of a choice, always with usage, as in llama-server."""
        del include_usage
        choice = {"text": "", "index": index, "logprobs": None, "finish_reason": reason}
        return _sse({"choices": [choice], **self._members, "usage": tally.usage(), **self._envelope.figures(tally)})


def unary_body(envelope: Envelope, choices: list[dict[str, Any]], tally: ChoiceTally) -> bytes:
    """Returns the body of a non-streamed answer; usage and timings are the first choice's, as in llama-server."""
    members = envelope.members(streamed=False)
    return encode({"choices": choices, **members, "usage": tally.usage(), **envelope.figures(tally)})


def chat_message(pieces: list[Piece], content: str) -> dict[str, Any]:
    """Returns the `message` of a chat choice."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    reasoning = "".join(piece.text for piece in pieces if piece.kind is PieceKind.REASONING)
    if reasoning:
        message["reasoning_content"] = reasoning
    of_calls = [piece for piece in pieces if piece.kind in {PieceKind.CALL_START, PieceKind.CALL_ARGUMENTS}]
    if of_calls:
        calls = itertools.groupby(of_calls, key=lambda piece: piece.call)
        message["tool_calls"] = [_whole_call(number, list(parts)) for number, parts in calls]
        message["content"] = content or None
    return message


def _whole_call(number: int, parts: list[Piece]) -> dict[str, Any]:
    name = "".join(part.text for part in parts if part.kind is PieceKind.CALL_START)
    arguments = "".join(part.text for part in parts if part.kind is PieceKind.CALL_ARGUMENTS)
    return {"type": "function", "function": {"name": name, "arguments": arguments}, "id": _call_id(number)}


def _delta(piece: Piece) -> dict[str, Any]:
    if piece.kind is PieceKind.CALL_START:
        function = {"name": piece.text, "arguments": ""}
        call = {"index": piece.call, "id": _call_id(piece.call), "type": "function", "function": function}
        return {"tool_calls": [call]}
    if piece.kind is PieceKind.CALL_ARGUMENTS:
        return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}
    return {piece.kind.value: piece.text}


def _call_id(number: int) -> str:
    return f"call_{number}"


def _sse(data: Mapping[str, Any]) -> bytes:
    return b"data: " + encode(data) + b"\n\n"
