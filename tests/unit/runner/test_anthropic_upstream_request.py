"""Chat payloads as requests of Anthropic's Messages API."""

from typing import Any

import pytest
from kit.failures import fails
from kit.messages_provider import problem_of, signature_of

from runner_svc.anthropic_upstream.anthropic_request import DEFAULT_MAX_TOKENS, messages_body
from runner_svc.policy.parameters import ParameterProfile
from runner_svc.runtimes.openai_remote.runtime import MESSAGES_PARAMETERS
from weft.api.common.v1 import chat_pb2
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.json_objects import add_member

PROFILE = ParameterProfile(engine=MESSAGES_PARAMETERS)
USER, ASSISTANT, SYSTEM, TOOL = chat_pb2.ROLE_USER, chat_pb2.ROLE_ASSISTANT, chat_pb2.ROLE_SYSTEM, chat_pb2.ROLE_TOOL


def _payload(*messages: chat_pb2.ChatMessage, **fields: Any) -> chat_pb2.ChatPayload:
    return chat_pb2.ChatPayload(messages=messages or [_said(USER, "Hi")], **fields)


def _said(role: chat_pb2.Role.ValueType, *texts: str, **fields: Any) -> chat_pb2.ChatMessage:
    return chat_pb2.ChatMessage(role=role, content=[chat_pb2.ContentPart(text=text) for text in texts], **fields)


def _body(payload: chat_pb2.ChatPayload) -> dict[str, Any]:
    body = messages_body(payload, "big-1", PROFILE).body
    assert problem_of(body) == ""
    return body


def _untaken(payload: chat_pb2.ChatPayload) -> list[str]:
    return [event.warning.field for event in messages_body(payload, "big-1", PROFILE).warnings]


def test_plain_chat_has_the_max_tokens_required_by_the_api() -> None:
    assert _body(_payload()) == {
        "model": "big-1",
        "max_tokens": DEFAULT_MAX_TOKENS,
        "stream": True,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    }


def test_conversation_with_tools_has_one_turn_per_speaker() -> None:
    call = chat_pb2.ToolCallRecord(id="t1", name="look", arguments_text='{"at": "it"}')
    broken = chat_pb2.ToolCallRecord(id="t2", name="look", arguments_text="{nope")
    payload = _payload(
        _said(SYSTEM, "Be terse."),
        _said(USER, "Look."),
        _said(ASSISTANT, "", tool_calls=[call, broken]),
        _said(TOOL, "seen", tool_call_id="t1"),
        _said(TOOL, "no", tool_call_id="t2"),
        _said(USER, "And?"),
        tools=[chat_pb2.Tool(function=chat_pb2.FunctionTool(name="look"))],
        tool_choice=chat_pb2.ToolChoice(mode=chat_pb2.ToolChoice.MODE_REQUIRED),
        parallel_tool_calls=False,
    )
    body = _body(payload)
    assert body["system"] == [{"type": "text", "text": "Be terse."}]
    assert [turn["role"] for turn in body["messages"]] == ["user", "assistant", "user"]
    assert body["messages"][1]["content"] == [
        {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "it"}},
        {"type": "tool_use", "id": "t2", "name": "look", "input": {"arguments": "{nope"}},
    ]
    assert [block["type"] for block in body["messages"][2]["content"]] == ["tool_result", "tool_result", "text"]
    assert body["tools"] == [{"name": "look", "input_schema": {"type": "object", "properties": {}}}]
    assert body["tool_choice"] == {"type": "any", "disable_parallel_tool_use": True}


def test_images_are_sent_as_bytes_and_recordings_are_refused() -> None:
    image = chat_pb2.ContentPart(image=chat_pb2.MediaPart(data=b"png", media_type="image/png"))
    body = _body(_payload(chat_pb2.ChatMessage(role=USER, content=[image])))
    source = {"type": "base64", "media_type": "image/png", "data": "cG5n"}
    assert body["messages"][0]["content"] == [{"type": "image", "source": source}]
    audio = chat_pb2.ContentPart(audio=chat_pb2.MediaPart(data=b"wav", media_type="audio/wav"))
    with fails(Reason.MODALITY_UNSUPPORTED):
        _body(_payload(chat_pb2.ChatMessage(role=USER, content=[audio])))


def test_cache_marks_keep_their_position() -> None:
    mark = chat_pb2.CacheMark(ttl="1h")
    system = chat_pb2.ChatMessage(role=SYSTEM, content=[chat_pb2.ContentPart(text="Long.", cache_mark=mark)])
    call = chat_pb2.ToolCallRecord(id="t1", name="look", arguments_text="{}", cache_mark=chat_pb2.CacheMark())
    result = _said(TOOL, "seen", tool_call_id="t1", cache_mark=mark)
    tool = chat_pb2.Tool(function=chat_pb2.FunctionTool(name="look", cache_mark=mark))
    body = _body(_payload(system, _said(USER, "Hi"), _said(ASSISTANT, tool_calls=[call]), result, tools=[tool]))
    hour, plain = {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral"}
    assert body["system"][0]["cache_control"] == hour
    assert body["messages"][1]["content"][0]["cache_control"] == plain
    assert body["messages"][2]["content"][0]["cache_control"] == hour
    assert body["tools"][0]["cache_control"] == hour
    assert "cache_control" not in body["messages"][0]["content"][0], "a negative control: only what is marked"


def test_supported_sampling_is_sent_and_the_rest_is_warned_about() -> None:
    payload = _payload()
    payload.sampling.max_tokens, payload.sampling.temperature, payload.sampling.top_k = 9, 0.5, 3
    payload.sampling.stop.append("END")
    payload.sampling.seed, payload.sampling.min_p = 1, 0.1
    body = _body(payload)
    assert (body["max_tokens"], body["temperature"], body["top_k"], body["stop_sequences"]) == (9, 0.5, 3, ["END"])
    assert sorted(_untaken(payload)) == ["min_p", "seed"]


def test_thinking_budget_comes_from_the_request_effort_or_limit() -> None:
    payload = _payload(thinking=True)
    payload.sampling.max_tokens = 20_000
    assert _body(payload)["thinking"] == {"type": "enabled", "budget_tokens": 8_192}
    payload.reasoning_effort = chat_pb2.REASONING_EFFORT_LOW
    assert _body(payload)["thinking"]["budget_tokens"] == 2_048
    add_member(payload.extra_parameters, "thinking_budget_tokens", 5_000, "budget")
    assert _body(payload)["thinking"]["budget_tokens"] == 5_000
    assert _untaken(payload) == []
    payload.sampling.max_tokens, payload.sampling.temperature = 3_000, 0.2
    assert _body(payload)["thinking"]["budget_tokens"] == 2_999
    assert _untaken(payload) == ["temperature"]
    payload.sampling.max_tokens = 100
    assert "thinking" not in _body(payload)
    assert _untaken(payload) == ["thinking"]
    payload.thinking = False
    assert _body(payload)["thinking"] == {"type": "disabled"}


def test_turn_after_a_tool_does_not_think_without_a_signature() -> None:
    call = chat_pb2.ToolCallRecord(id="t1", name="look", arguments_text="{}")
    turns = (_said(USER, "Hi"), _said(ASSISTANT, tool_calls=[call]), _said(TOOL, "seen", tool_call_id="t1"))
    payload = _payload(*turns, thinking=True)
    assert "thinking" not in _body(payload)
    assert _untaken(payload) == ["thinking"]


def test_turn_after_a_tool_continues_with_signed_thinking() -> None:
    call = chat_pb2.ToolCallRecord(id="t1", name="look", arguments_text="{}")
    calling = _said(ASSISTANT, "I look.", tool_calls=[call], reasoning="Hm.")
    calling.signed_reasoning.add(text="Hm.", signature=signature_of("Hm."))
    calling.signed_reasoning.add(redacted="xyz")
    payload = _payload(_said(USER, "Hi"), calling, _said(TOOL, "seen", tool_call_id="t1"), thinking=True)
    assert _body(payload)["thinking"]["type"] == "enabled"
    assert _untaken(payload) == []
    assert _body(payload)["messages"][1]["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": signature_of("Hm.")},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "t1", "name": "look", "input": {}},
    ]


def test_thinking_without_a_signature_is_not_sent() -> None:
    said = _said(ASSISTANT, "I look.", reasoning="Hm.")
    blocks = _body(_payload(_said(USER, "Hi"), said, _said(USER, "And?")))["messages"][1]["content"]
    assert blocks == [{"type": "text", "text": "I look."}]


@pytest.mark.parametrize("field", ["n", "response_format"])
def test_unsupported_field_is_refused_by_name(field: str) -> None:
    payload = _payload()
    if field == "n":
        payload.choice_count = 2
    else:
        payload.response_format.json_object = True
    with fails(Reason.INVALID_ARGUMENT, match=f" {field}: "):
        messages_body(payload, "big-1", PROFILE)
