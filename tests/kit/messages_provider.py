"""A provider with Anthropic's Messages API, for tests: it validates requests like the real one, and streams scripts.

Events, their order and their fields follow the API's documentation (version 2023-06-01).
"""

import base64
import hashlib
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

API_VERSION = "2023-06-01"
USAGE = {"input_tokens": 7, "cache_creation_input_tokens": 2_000, "cache_read_input_tokens": 30, "output_tokens": 1}
WORDS = ("one ", "two ", "three")
Json = dict[str, Any]


def text_block(*words: str) -> tuple[Json, list[Json]]:
    """Returns the start of a block of text, and its deltas."""
    return {"type": "text", "text": ""}, [{"type": "text_delta", "text": word} for word in words]


def thinking_block(*words: str) -> tuple[Json, list[Json]]:
    """Returns the start of a thinking block, and its deltas with the signature at the end."""
    deltas: list[Json] = [{"type": "thinking_delta", "thinking": word} for word in words]
    return {"type": "thinking", "thinking": "", "signature": ""}, [
        *deltas,
        {"type": "signature_delta", "signature": signature_of("".join(words))},
    ]


def signature_of(thinking: str) -> str:
    """Returns the signature of a thinking block, which is rejected if the text was changed."""
    return base64.b64encode(hashlib.sha256(b"signed" + thinking.encode()).digest()).decode()


def redacted_block(data: str) -> tuple[Json, list[Json]]:
    """Returns a block of encrypted thinking, which has no deltas."""
    return {"type": "redacted_thinking", "data": data}, []


def tool_block(call_id: str, name: str, *parts: str) -> tuple[Json, list[Json]]:
    """Returns the start of a tool call, and its deltas; `parts` are pieces of its arguments in JSON."""
    deltas = [{"type": "input_json_delta", "partial_json": part} for part in ("", *parts)]
    return {"type": "tool_use", "id": call_id, "name": name, "input": {}}, deltas


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesReply:
    """The scripted reply to one request."""

    blocks: tuple[tuple[Json, list[Json]], ...] = ()
    """Empty: one block with WORDS."""
    stop_reason: str = "end_turn"
    breaks_with: str = ""
    """Type of an error event that replaces the end; empty: the message ends regularly."""


@dataclass
class MessagesProvider:
    """The provider; `replies` are for the next requests, later ones get WORDS."""

    url: str = ""
    keys: set[str] = field(default_factory=set)
    """Accepted keys; empty: any."""
    replies: deque[MessagesReply] = field(default_factory=deque)
    bodies: list[Json] = field(default_factory=list)
    """Bodies of the requests, accepted or not."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answers POST /v1/messages."""
        body = await request.json()
        self.bodies.append(body)
        if self.keys and request.headers.get("x-api-key") not in self.keys:
            return _refusal(401, "authentication_error", f"invalid x-api-key {request.headers.get('x-api-key')}")
        if request.headers.get("anthropic-version") != API_VERSION:
            return _refusal(400, "invalid_request_error", "anthropic-version: header is required")
        if problem := problem_of(body):
            return _refusal(400, "invalid_request_error", problem)
        reply = self.replies.popleft() if self.replies else MessagesReply()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for event in events_of(reply, body["model"]):
            await response.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
        await response.write_eof()
        return response


def problem_of(body: Json) -> str:
    """Returns why the API rejects a request; empty: it accepts it."""
    return next(filter(None, (check(body) for check in (_of_fields, _of_turns, _of_thinking, _of_signatures))), "")


def _of_signatures(body: Json) -> str:
    messages = body["messages"]
    for number, message in enumerate(messages):
        for index, block in enumerate(message["content"]):
            if block["type"] == "thinking" and block.get("signature") != signature_of(block["thinking"]):
                return f"messages.{number}.content.{index}: Invalid `signature` in `thinking` block"
    is_result = messages[-1]["role"] == "user" and messages[-1]["content"][0]["type"] == "tool_result"
    if body.get("thinking", {}).get("type") != "enabled" or not is_result:
        return ""
    begins = messages[-2]["content"][0]["type"]
    if begins in ("thinking", "redacted_thinking"):
        return ""
    return (
        f"messages.{len(messages) - 2}.content.0.type: Expected `thinking` or `redacted_thinking`, "
        f"but found `{begins}`. When `thinking` is enabled, a final `assistant` message must start with a "
        "thinking block"
    )


def _of_fields(body: Json) -> str:
    if not isinstance(body.get("max_tokens"), int) or body["max_tokens"] < 1:
        return "max_tokens: Field required"
    if unknown := body.keys() - _FIELDS:
        return f"{min(unknown)}: Extra inputs are not permitted"
    marks = json.dumps(body).count('"cache_control"')
    return "" if marks <= 4 else f"A maximum of 4 blocks with cache_control may be provided. Found {marks}."


def _of_turns(body: Json) -> str:
    messages = body.get("messages") or [{"role": "none", "content": []}]
    if messages[0]["role"] != "user":
        return "messages: first message must use the user role"
    if any(message["role"] not in ("user", "assistant") for message in messages):
        return "messages: Input should be 'user' or 'assistant'"
    blocks = [block for message in messages for block in message["content"]]
    if any(block["type"] == "text" and not block["text"] for block in blocks):
        return "messages: text content blocks must be non-empty"
    called = {block["id"] for block in blocks if block["type"] == "tool_use"}
    answered = {block["tool_use_id"] for block in blocks if block["type"] == "tool_result"}
    return "" if answered <= called else "messages: unexpected `tool_use_id` found in `tool_result` blocks"


def _of_thinking(body: Json) -> str:
    thinking = body.get("thinking", {})
    if thinking.get("type") != "enabled":
        return ""
    if not 1_024 <= thinking.get("budget_tokens", 0) < body["max_tokens"]:
        return "thinking.budget_tokens: must be at least 1024 and less than max_tokens"
    is_sampled = body.get("temperature", 1) != 1 or "top_k" in body
    return "temperature may only be set to 1 when thinking is enabled" if is_sampled else ""


_FIELDS = frozenset(
    (
        *("model", "max_tokens", "messages", "system", "stream", "temperature", "top_p", "top_k", "stop_sequences"),
        *("tools", "tool_choice", "thinking", "metadata"),
    )
)


def events_of(reply: MessagesReply, model: str) -> list[Json]:
    """Returns the events of a reply in order."""
    message: Json = {
        "id": "msg_01",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": USAGE,
    }
    events: list[Json] = [{"type": "message_start", "message": message}, {"type": "ping"}]
    for index, (block, deltas) in enumerate(reply.blocks or (text_block(*WORDS),)):
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    if reply.breaks_with:
        error = {"type": reply.breaks_with, "message": "something failed"}
        return [*events, {"type": "error", "error": error}]
    ended = {"stop_reason": reply.stop_reason, "stop_sequence": None}
    return [
        *events,
        {"type": "message_delta", "delta": ended, "usage": {"output_tokens": 15}},
        {"type": "message_stop"},
    ]


def _refusal(status: int, kind: str, message: str) -> web.Response:
    body = {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_01"}
    return web.json_response(body, status=status)


@asynccontextmanager
async def messages_provider() -> AsyncIterator[MessagesProvider]:
    """Runs a provider on loopback during the block."""
    provider = MessagesProvider()
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_post("/v1/messages", provider.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        provider.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        yield provider
    finally:
        await runner.cleanup()
