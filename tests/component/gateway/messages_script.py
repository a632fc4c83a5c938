"""The real client of Anthropic's API against a test gateway, and its conversations."""

import json
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient
from anthropic.types import MessageParam
from gateway_script import RawResponse, RunningGateway, ScriptedDispatcher, delta

from weft.api.common.v1 import event_pb2, tokenize_pb2
from weft.dispatch.call import Call
from weft.dispatch.request_receipt import RequestContext
from weft.kernel.requests.request_values import Operation

MESSAGES: list[MessageParam] = [{"role": "user", "content": "Say hello"}]
MESSAGES_PATH = "/v1/messages"


@asynccontextmanager
async def anthropic_of(gateway: RunningGateway, **options: Any) -> AsyncIterator[AsyncAnthropic]:
    """A client that does not retry unless `options` set that."""
    given: dict[str, Any] = {"api_key": "unused", "max_retries": 0} | options
    http = DefaultAsyncHttpxClient(verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    async with AsyncAnthropic(base_url=gateway.service.url, http_client=http, **given) as client:
        yield client


def call(index: int, call_id: str = "", name: str = "", arguments: str = "") -> event_pb2.InferenceEvent:
    """An event with a chunk of one call."""
    piece = event_pb2.ToolCallDelta(index=index, id=call_id, name=name, arguments_text=arguments)
    return delta(tool_calls=[piece])


def body(**fields: object) -> bytes:
    """A request as JSON; `fields` replace those of a short one."""
    request = {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
    return json.dumps(request | fields).encode()


def events_of(response: RawResponse) -> list[tuple[str, Any]]:
    """The events of a stream: their names, and their data."""
    found = []
    for block in response.body.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


def names_of(events: Sequence[tuple[str, Any]]) -> list[str]:
    """The names of the events."""
    return [name for name, _ in events]


@dataclass
class CountingDispatcher(ScriptedDispatcher):
    """Counts the tokens of every request as `counted`, and records the requests."""

    counted: tokenize_pb2.TokenizeResult | Exception = field(
        default_factory=lambda: tokenize_pb2.TokenizeResult(count=42)
    )
    asked: list[tuple[RequestContext, tokenize_pb2.TokenizePayload]] = field(default_factory=list)

    def script_of(self, call: Call[Any]) -> Sequence[Any]:
        if call.spec.operation is not Operation.TOKENIZE:
            return super().script_of(call)
        self.asked.append((call.context, call.payload))
        return [self.counted]


def claude_code_request() -> dict[str, Any]:
    """A turn of Claude Code 2.1 as recorded, with shorter texts."""
    cached = {"type": "ephemeral"}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": {}}
    names = (
        "Agent",
        "Bash",
        "DeferredToolPlaceholder",
        "Edit",
        "Glob",
        "Grep",
        "Read",
        "Skill",
        "TodoWrite",
        "ToolSearch",
    )
    tools: list[dict[str, Any]] = [{"name": name, "description": name, "input_schema": schema} for name in names]
    tools.append({"name": "Write", "input_schema": schema, "defer_loading": True, "eager_input_streaming": True})
    tools.append({"name": "mcp__plugin_with_a_long_name__" + "a" * 80, "input_schema": schema, "cache_control": cached})
    return {
        "model": "tiny",
        "max_tokens": 32_000,
        "stream": True,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.328"},
            {"type": "text", "text": "You are Claude Code.", "cache_control": cached},
            {"type": "text", "text": "Long instructions.", "cache_control": cached | {"ttl": "1h"}},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>Today is Friday.</system-reminder>"},
                    {"type": "text", "text": "List the files", "cache_control": cached},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I should look.", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
                    {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {"file_path": "/nope"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.py\nb.py", "is_error": False},
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_2",
                        "content": [{"type": "text", "text": "<tool_use_error>No such file.</tool_use_error>"}],
                        "is_error": True,
                        "cache_control": cached,
                    },
                ],
            },
            {"role": "system", "content": "The user opened b.py."},
            {"role": "user", "content": "And now?"},
        ],
        "tools": tools,
        "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'},
        "thinking": {"type": "adaptive", "display": "updates"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }


CLAUDE_CODE_HEADERS = {
    "accept": "application/json",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "anthropic-version": "2023-06-01",
    "authorization": "Bearer unused",
    "user-agent": "claude-cli/2.1.328 (external, sdk-cli)",
    "x-app": "cli",
    "x-stainless-retry-count": "0",
    "x-stainless-timeout": "600",
}
