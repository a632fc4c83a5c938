"""Values that weft does not use, and empty maps as PHP writes them, do not refuse a request."""

import base64
import json
from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import model_validator

from gateway.anthropic.messages import to_payload as to_messages
from gateway.anthropic.schema import MessagesRequest
from gateway.gateway_config import MediaConfig, RequestLimits
from gateway.intake.json_guard import parse
from gateway.intake.request_model import StrictModel
from gateway.media import RequestMedia
from gateway.openai.chat import to_payload
from gateway.openai.chat_schema import ChatRequest
from gateway.openai.embeddings import EmbeddingRequest
from gateway.responses.payload import Conversation, own_items, to_response_request
from gateway.responses.schema import ResponsesRequest
from weft.api.common.v1 import chat_pb2
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.text.json_objects import plain_object
from weft_extensions.ollama.payload import to_chat as to_ollama
from weft_extensions.ollama.schema import OllamaChatRequest
from weft_testing.media_files import png, wav

LIMITS = RequestLimits()
USER = {"role": "user", "content": "x"}
MESSAGES: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [USER]}
MEDIA = RequestMedia(MediaConfig())


def chat_of(**fields: object) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"model": "m", "messages": [USER], **fields}).encode(), max_depth=64)


@pytest.mark.parametrize(
    "fields",
    [
        {"service_tier": "on_demand"},
        {"service_tier": 3},
        {"metadata": {"run": 7}},
        {"metadata": {"trace": {"id": "a"}, "n": None}},
        {"user": 5},
        {"user": {"id": 5}},
        {"safety_identifier": ["x"]},
        {"prompt_cache_retention": "1h"},
        {"moderation": "low"},
        {"audio": "x"},
        {"stream": True, "stream_options": {"include_obfuscation": "no"}},
    ],
)
def test_value_that_is_not_used_is_accepted_in_any_form(fields: dict[str, object]) -> None:
    to_payload(chat_of(**fields), LIMITS)


def test_values_of_metadata_and_user_become_text() -> None:
    request = chat_of(metadata={"run": 7, "trace": {"id": "é"}, "s": "t"}, user=5)
    assert request.own_metadata == {"run": "7", "trace": '{"id": "é"}', "s": "t"}
    assert request.end_user == "5"
    message = parse(MessagesRequest, json.dumps({**MESSAGES, "metadata": {"user_id": 7}}).encode(), max_depth=64)
    assert message.end_user == "7"


@pytest.mark.parametrize(
    ("fields", "field"), [({"user": "x" * 513}, "user"), ({"metadata": {"a": "x" * 513}}, "metadata.a")]
)
def test_text_beyond_its_limit_is_refused_in_characters(fields: dict[str, object], field: str) -> None:
    with pytest.raises(FieldError, match="512 characters") as refused:
        chat_of(**fields)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        {"metadata": [], "logit_bias": [], "chat_template_kwargs": []},
        {"stream": True, "stream_options": []},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": []}}},
    ],
)
def test_empty_list_stands_for_an_empty_map(fields: dict[str, object]) -> None:
    to_payload(chat_of(**fields), LIMITS)


def test_empty_lists_of_a_request_are_read_in_one_more_pass() -> None:
    """Each field took a pass of its own: 8 MB with eight of them blocked the gateway for as many validations."""
    passes = 0

    class Request(StrictModel):
        named: dict[str, dict[str, int]]
        other: dict[str, int]

        @model_validator(mode="before")
        @classmethod
        def _count(cls, data: object) -> object:
            nonlocal passes
            passes += 1
            return data

    names = [f"n{number}" for number in range(30)]
    raw = json.dumps({"named": {name: [] for name in names}, "other": []}).encode()
    assert parse(Request, raw, max_depth=64).named == {name: {} for name in names}
    assert passes == 2


def test_tool_without_parameters_in_php_has_an_empty_schema() -> None:
    tools = [{"type": "function", "function": {"name": f"f{number}", "parameters": []}} for number in range(50)]
    payload = to_payload(chat_of(tools=tools), LIMITS)
    assert [plain_object(tool.function.parameters) for tool in payload.tools] == [{}] * 50


@pytest.mark.parametrize("arguments", [[], "[]", " []", {}, None])
def test_earlier_call_without_arguments_has_an_empty_object(arguments: object) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c", "content": "r"}
    turns = [USER, {"role": "assistant", "content": None, "tool_calls": [call, call]}, result]
    assert _arguments_of(to_payload(chat_of(messages=turns), LIMITS)) == ["{}", "{}"]

    body = {"model": "m", "messages": [USER, {"role": "assistant", "tool_calls": [call]}, result]}
    ollama = parse(OllamaChatRequest, json.dumps(body).encode(), max_depth=64)
    assert _arguments_of(to_ollama(ollama, LIMITS, MEDIA, 0).payload) == ["{}"]

    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": arguments}]}
    answer = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]}
    message = parse(MessagesRequest, json.dumps({**MESSAGES, "messages": [USER, use, answer]}).encode(), max_depth=64)
    assert _arguments_of(to_messages(message, LIMITS, MEDIA).payload) == ["{}"]

    if arguments is not None:
        items = [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
        ]
        raw = json.dumps({"model": "m", "input": [USER, *items]}).encode()
        response = parse(ResponsesRequest, raw, max_depth=64)
        made = to_response_request(response, Conversation(own_items(response)), MEDIA, LIMITS)
        assert _arguments_of(made.payload) == ["{}"]


def _arguments_of(payload: chat_pb2.ChatPayload) -> list[str]:
    return [call.arguments_text for message in payload.messages for call in message.tool_calls]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": []}, "messages"),
        ({"model": []}, "model"),
        ({"tools": [{"type": "function", "function": []}]}, "tools[0].function.name"),
        ({"response_format": []}, "response_format.type"),
        ({"metadata": [1]}, "metadata"),
    ],
)
def test_other_list_in_the_wrong_place_is_refused_by_name(fields: dict[str, object], field: str) -> None:
    with pytest.raises(FieldError) as refused:
        chat_of(**fields)
    assert refused.value.field == field


PNG = base64.b64encode(png(1, 1)).decode()
LOOSE = (
    PNG,
    f"data:image/jpeg;base64,{PNG}",
    f"data:;base64,{PNG}",
    f"data:application/octet-stream;name=a;base64, {PNG}",
    "\r\n".join(PNG[start : start + 20] for start in range(0, len(PNG), 20)),
    PNG.replace("+", "-").replace("/", "_"),
    PNG.rstrip("="),
    PNG.replace("+", "%2B").replace("=", "%3D"),
)


@pytest.mark.parametrize("data", LOOSE)
def test_image_is_read_from_loose_base64_under_the_type_of_its_bytes(data: str) -> None:
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": data}}
    message = parse(MessagesRequest, json.dumps({**MESSAGES, "messages": [turn_of(block)]}).encode(), max_depth=64)
    body = {"model": "m", "messages": [{"role": "user", "content": "x", "images": [data]}]}
    ollama = parse(OllamaChatRequest, json.dumps(body).encode(), max_depth=64)
    chat = chat_of(messages=[turn_of({"type": "image_url", "image_url": {"url": data}})])
    for payload in (
        to_messages(message, LIMITS, MEDIA).payload,
        to_ollama(ollama, LIMITS, MEDIA, 0).payload,
        to_payload(chat, LIMITS),
    ):
        image = payload.messages[0].content[-1].image
        assert (image.media_type, image.data) == ("image/png", png(1, 1))


def turn_of(part: Mapping[str, object]) -> dict[str, object]:
    return {"role": "user", "content": [part]}


def test_image_in_a_tool_result_reaches_the_model_whatever_its_name() -> None:
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/webp", "data": PNG}}
    result = turn_of({"type": "tool_result", "tool_use_id": "c", "content": [block]})
    raw = json.dumps({**MESSAGES, "messages": [USER, use, result]}).encode()
    found = to_messages(parse(MessagesRequest, raw, max_depth=64), LIMITS, MEDIA)
    assert found.payload.messages[-1].content[0].image.media_type == "image/png"
    assert not found.warnings


def test_note_for_the_model_says_why_an_image_is_left_out() -> None:
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
    data = base64.b64encode(b"%PDF-1.7").decode()
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    result = turn_of({"type": "tool_result", "tool_use_id": "c", "content": [block]})
    raw = json.dumps({**MESSAGES, "messages": [USER, use, result]}).encode()
    note = to_messages(parse(MessagesRequest, raw, max_depth=64), LIMITS, MEDIA).payload.messages[-1].content[0].text
    assert note.endswith("its content is a PDF document]")
    assert "this model" not in note


SOUND = base64.b64encode(wav(seconds=1)).decode()


@pytest.mark.parametrize(
    "part",
    [
        *(
            {"type": "input_audio", "input_audio": {"data": SOUND, "format": form}}
            for form in ("WAV", "audio/wav", "mp3")
        ),
        {"type": "input_audio", "input_audio": {"data": f"data:audio/wav;base64,{SOUND}"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/x-wav;base64,{SOUND}"}},
    ],
)
def test_recording_is_read_from_every_spelling(part: dict[str, object]) -> None:
    audio = to_payload(chat_of(messages=[turn_of(part)]), LIMITS).messages[0].content[0].audio
    assert (audio.media_type, audio.data) == ("audio/wav", wav(seconds=1))


def test_recording_at_an_address_is_refused_with_what_to_send() -> None:
    part = {"type": "audio_url", "audio_url": {"url": "https://x.example/a.wav"}}
    with pytest.raises(FieldError, match="must be base64 or a data: URL: recordings are not fetched") as refused:
        to_payload(chat_of(messages=[turn_of(part)]), LIMITS)
    assert refused.value.field == "messages[0].content[0].audio_url.url"


def test_empty_list_that_no_map_can_replace_keeps_its_message() -> None:
    with pytest.raises(WeftError, match="must be a string, a list of strings"):
        parse(EmbeddingRequest, b'{"model": "m", "input": []}', max_depth=64)
