"""No route drops an unknown field silently, at any depth: it is passed on, or a warning or a refusal names it."""

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from asgi_call import answer_of
from bad_inputs_server import CONFIG, ForgetfulDispatcher, forgetful_ports
from bad_inputs_stage import ENDPOINTS, Endpoint, takes_json
from file_script import MemoryFiles
from gateway_script import app_of, finished, started

from weft.dispatch.call import Call
from weft.kernel.requests.request_values import Operation

UNKNOWN = "zz_unheard"
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PARAMETERS = {"type": "object"}
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
DATA_URL = f"data:image/png;base64,{PNG}"
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
TEXT = {"type": "text", "text": "x"}
FREE = frozenset({"parameters", "schema", "input_schema", "input", "arguments", "metadata", "logit_bias", "body"})
"""Names of objects whose members the caller chooses, and of those that other tests cover."""
CHAT = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "x"},
        {"role": "user", "content": [TEXT, {"type": "image_url", "image_url": {"url": DATA_URL}}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": [TEXT]},
    ],
    "tools": [FUNCTION],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS}},
    "prediction": {"type": "content", "content": [TEXT]},
    "chat_template_kwargs": {"enable_thinking": False},
}
SOURCE = {"type": "base64", "media_type": "image/png", "data": PNG}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
BLOCKS = [
    {"role": "user", "content": [TEXT, {"type": "image", "source": SOURCE}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}, USE]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [TEXT]}]},
]  # fmt: skip
MESSAGES = {
    "model": "tiny",
    "max_tokens": 9,
    "system": [TEXT],
    "messages": BLOCKS,
    "tools": [{"name": "f", "input_schema": PARAMETERS}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"format": {"type": "json_schema", "schema": PARAMETERS}},
    "metadata": {"user_id": "x"},
}
OLLAMA = {
    "model": "tiny",
    "messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "x"},
    ],
    "tools": [FUNCTION],
    "options": {"seed": 1},
    "stream": False,
}
INPUT_TEXT = {"type": "input_text", "text": "x"}
RESPONSES = {
    "model": "tiny",
    "store": False,
    "input": [
        {"role": "user", "content": [INPUT_TEXT, {"type": "input_image", "image_url": DATA_URL}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
        {"role": "user", "content": "x"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": PARAMETERS}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": PARAMETERS}},
    "decoding": {"top_k": 4},
}  # fmt: skip
FULLER: dict[str, list[Any]] = {
    "/v1/chat/completions": [CHAT, {**CHAT, "stream": True, "stream_options": {"include_usage": True}}],
    "/v1/messages": [MESSAGES],
    "/v1/messages/count_tokens": [{**MESSAGES, "max_tokens": None, "metadata": None}],
    "/api/chat": [OLLAMA],
    "/v1/responses": [RESPONSES],
    "/v1/rerank": [{"model": "tiny", "query": "q", "documents": ["a", {"text": "b"}]}],
    "/v1/tokenize": [{"model": "tiny", "messages": CHAT["messages"], "tools": [FUNCTION]}],
}  # fmt: skip


def objects_in(value: Any) -> Iterator[dict[str, Any]]:
    """Yields the objects of a body whose members a schema names."""
    if isinstance(value, list):
        for entry in value:
            yield from objects_in(entry)
    if isinstance(value, dict):
        yield value
        for name, inner in value.items():
            if name not in FREE or (name == "input" and isinstance(inner, list)):
                yield from objects_in(inner)


def bodies() -> Iterator[Any]:
    for endpoint in filter(takes_json, ENDPOINTS):
        if endpoint.path == "/mcp":
            # The library that serves it ignores members that the protocol does not name, as the protocol says.
            continue
        for number, good in enumerate([endpoint.good, *FULLER.get(endpoint.path, [])]):
            for index in range(len(list(objects_in(good)))):
                body = copy.deepcopy(good)
                list(objects_in(body))[index][UNKNOWN] = {"a": 1}
                yield pytest.param(endpoint, body, id=f"{endpoint} {number} {index}")


@dataclass
class ListeningDispatcher(ForgetfulDispatcher):
    """Keeps the payloads that it was given."""

    heard: list[str] = field(default_factory=list)

    def note(self, call: Call[Any]) -> None:
        super().note(call)
        self.heard.append(str(call.payload))

    def script_of(self, call: Call[Any]) -> Sequence[Any]:
        if call.spec.operation is not Operation.TRANSCRIPTION:
            return super().script_of(call)
        return [[started()], *super().script_of(call), [finished()]]


@pytest.mark.parametrize(("endpoint", "body"), [*bodies()])
async def test_unknown_field_is_passed_on_or_named(endpoint: Endpoint, body: Any) -> None:
    heard = ListeningDispatcher()
    ports = replace(forgetful_ports(), dispatcher=heard)
    answer = await answer_of(app_of(CONFIG, ports), endpoint.method, endpoint.address, json.dumps(body).encode())
    # Some routes exist only with keys, and one of the resources has another field in the catalogue.
    is_refused = answer.status == 404 or (endpoint.kind == "declaration" and answer.status == 400)
    assert is_refused or UNKNOWN in str(heard.heard) + str(answer.body) + str(answer.headers), answer


async def test_entries_of_a_list_share_one_warning_that_names_the_first() -> None:
    document = {"text": "a", UNKNOWN: 1}
    body = {"model": "tiny", "query": "q", "documents": ["a", document, document]}
    answer = await answer_of(app_of(CONFIG, forgetful_ports()), "POST", "/v1/rerank", json.dumps(body).encode())
    assert [each["field"] for each in answer.of(200)["warnings"]] == [f"documents[1].{UNKNOWN}"]
    assert answer.headers["x-weft-warning-fields"] == f"documents[1].{UNKNOWN}"


def form_of(**values: str) -> tuple[bytes, tuple[tuple[bytes, bytes], ...]]:
    """A form with a file, and the header of its type."""
    parts = [
        f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in values.items()
    ]
    parts.append('--b\r\nContent-Disposition: form-data; name="file"; filename="a.mp3"\r\n\r\nx\r\n--b--\r\n')
    return "".join(parts).encode(), ((b"content-type", b"multipart/form-data; boundary=b"),)


@pytest.mark.parametrize("name", [UNKNOWN, f"{UNKNOWN}[]", f"{UNKNOWN}[anchor]"])
@pytest.mark.parametrize("form", ["json", "text", "stream", "file"])
async def test_unknown_field_of_a_form_is_named(form: str, name: str) -> None:
    path, values = "/v1/audio/transcriptions", {"model": "tiny", "response_format": form}
    if form == "stream":
        values = {"model": "tiny", "stream": "true"}
    if form == "file":
        path, values = "/v1/files", {"purpose": "batch"}
    ports = replace(forgetful_ports(), dispatcher=ListeningDispatcher(), files=MemoryFiles())
    body, headers = form_of(**values, **{name: "1"})
    answer = await answer_of(app_of(CONFIG, ports), "POST", path, body, headers)
    assert answer.status == 200, answer
    assert UNKNOWN in str(answer.body) + str(answer.headers)


@pytest.mark.parametrize("extra", [{}, {"stream_format": "sse"}])
async def test_unknown_field_of_speech_is_named(extra: dict[str, str]) -> None:
    body = {"model": "tiny", "input": "hi", "lang_code": "a", **extra}
    answer = await answer_of(app_of(CONFIG, forgetful_ports()), "POST", "/v1/audio/speech", json.dumps(body).encode())
    assert "lang_code" in str(answer.body) + str(answer.headers)
