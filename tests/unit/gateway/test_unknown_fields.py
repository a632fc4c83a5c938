"""Fields of calls and messages that weft does not know: they reach the client, and the engine again, on every API."""

import json
from typing import Any

import pytest
from answer_events import IDENTITY, Frame, call, calling, data_of, finished, piece, stopped

from gateway.answers.answer_builder import AnswerBuilder
from gateway.answers.sse import StreamEncoder
from gateway.anthropic.message_stream import MessagesAnswer, MessagesStream
from gateway.anthropic.messages import to_payload as to_messages
from gateway.anthropic.schema import MessagesRequest
from gateway.gateway_config import MediaConfig, RequestLimits
from gateway.intake.json_guard import parse
from gateway.media import RequestMedia
from gateway.openai.chat import to_payload
from gateway.openai.chat_answer import ChatAnswer, ChatStream
from gateway.openai.chat_schema import ChatRequest
from gateway.openai.completions import CompletionAnswer, CompletionStream
from gateway.responses.output import OutputItems
from gateway.responses.payload import Conversation, own_items, to_response_request
from gateway.responses.schema import ResponsesRequest
from weft.api.common.v1 import chat_pb2
from weft.kernel.text.json_objects import plain_object, to_json_object
from weft_extensions.ollama.answers import OllamaAnswer, OllamaStream, Shape
from weft_extensions.ollama.payload import to_chat
from weft_extensions.ollama.schema import OllamaChatRequest

CALL_EXTRA = {"extra_content": {"google": {"thought_signature": "S"}}, "function": {"thought_signature": "T"}}
DETAILS = [
    {"type": "reasoning.text", "text": "h", "index": 0, "format": "f"},
    {"type": "reasoning.text", "text": "m", "index": 0, "format": "f"},
    {"type": "reasoning.text", "text": "", "index": 0, "signature": "S"},
    {"type": "reasoning.encrypted", "data": "D", "index": 1},
]
JOINED = [{"type": "reasoning.text", "text": "hm", "index": 0, "format": "f", "signature": "S"}, DETAILS[-1]]


def _extra(fields: dict[str, Any]) -> Any:
    return to_json_object(fields, "extra_fields")


CALL = call(id="c", name="f", arguments_text="{}", extra_fields=_extra(CALL_EXTRA))
FRAME = [
    *(piece(extra_fields=_extra({"reasoning_details": [part]})) for part in DETAILS),
    calling(CALL),
    stopped("TOOL_CALLS"),
    finished(),
]
STOPPED = [piece(text="a"), stopped(stop_sequence="END"), finished()]


def _body(answer: AnswerBuilder, frame: Frame = FRAME) -> Any:
    answer.add(frame)
    return json.loads(answer.body())


def _data(encoder: StreamEncoder, frame: Frame = FRAME) -> list[dict[str, Any]]:
    return data_of(encoder.encode(frame))


def test_chat_has_call_signatures_and_reasoning_details() -> None:
    message = _body(ChatAnswer(IDENTITY, choice_count=1, logprobs=False))["choices"][0]["message"]
    assert message["reasoning_details"] == JOINED
    (call,) = message["tool_calls"]
    assert call == {
        **CALL_EXTRA,
        "id": "c",
        "type": "function",
        "function": {"thought_signature": "T", "name": "f", "arguments": "{}"},
    }


def test_streamed_chat_has_signatures_and_reasoning_details_unchanged() -> None:
    chunks = _data(ChatStream(IDENTITY, choice_count=1, logprobs=False))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [part for delta in deltas for part in delta.get("reasoning_details", ())] == DETAILS
    ((call,),) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert call["extra_content"] == CALL_EXTRA["extra_content"]
    assert call["function"] == {"thought_signature": "T", "name": "f", "arguments": "{}"}


def _calls_of_other_apis() -> dict[str, dict[str, Any]]:
    items = OutputItems("resp_1", logprobs=False)
    for event in FRAME:
        if event.HasField("delta"):
            items.add(event.delta)
    starts = [event["content_block"] for event in _data(MessagesStream(IDENTITY)) if "content_block" in event]
    lines = _data(OllamaStream(IDENTITY, Shape.MESSAGE))
    return {
        "responses": items.json("completed")[-1],
        "messages": _body(MessagesAnswer(IDENTITY))["content"][-1],
        "streamed messages": starts[-1],
        "ollama": _body(OllamaAnswer(IDENTITY, Shape.MESSAGE))["message"]["tool_calls"][0],
        "streamed ollama": next(line["message"]["tool_calls"][0] for line in lines if "tool_calls" in line["message"]),
    }


def test_calls_in_every_other_api_have_the_signature() -> None:
    for api, made in _calls_of_other_apis().items():
        assert made["extra_content"] == CALL_EXTRA["extra_content"], api
        assert made["function"]["thought_signature"] == "T", api


def _chat(request: dict[str, Any]) -> chat_pb2.ChatPayload:
    return to_payload(parse(ChatRequest, json.dumps({"model": "m", **request}).encode(), max_depth=64), RequestLimits())


def _earlier_turns() -> dict[str, chat_pb2.ChatPayload]:
    other = _calls_of_other_apis()
    limits, media = RequestLimits(), RequestMedia(MediaConfig())
    message = _body(ChatAnswer(IDENTITY, choice_count=1, logprobs=False))["choices"][0]["message"]
    user = {"role": "user", "content": "x"}
    messages = {
        "model": "m",
        "max_tokens": 9,
        "messages": [user, {"role": "assistant", "content": [other["messages"]]}],
    }
    ollama = {"model": "m", "messages": [user, {"role": "assistant", "content": "", "tool_calls": [other["ollama"]]}]}
    responses = {"model": "m", "input": [user, other["responses"]]}
    asked_of_messages = parse(MessagesRequest, json.dumps(messages).encode(), max_depth=64)
    asked_of_ollama = parse(OllamaChatRequest, json.dumps(ollama).encode(), max_depth=64)
    asked = parse(ResponsesRequest, json.dumps(responses).encode(), max_depth=64)
    return {
        "chat": _chat({"messages": [user, message]}),
        "messages": to_messages(asked_of_messages, limits, media).payload,
        "ollama": to_chat(asked_of_ollama, limits, media, 99).payload,
        "responses": to_response_request(asked, Conversation(own_items(asked)), media, limits).payload,
    }


def test_extra_fields_of_a_call_are_sent_back_to_the_engine() -> None:
    for api, payload in _earlier_turns().items():
        (call,) = payload.messages[-1].tool_calls
        assert plain_object(call.extra_fields) == CALL_EXTRA, api
    assert plain_object(_earlier_turns()["chat"].messages[-1].extra_fields) == {"reasoning_details": JOINED}


@pytest.mark.parametrize("empty", [None, "", [], {}])
def test_empty_and_answer_only_fields_are_not_sent_back(empty: object) -> None:
    said = {"role": "assistant", "content": "a", "annotations": [{"url": "u"}], "parsed": {"a": 1}, "any": empty}
    payload = _chat({"messages": [said, {"role": "user", "content": "x", "any": "b"}]})
    assert [message.HasField("extra_fields") for message in payload.messages] == [False, False]


def test_stop_string_that_ended_an_answer_is_reported() -> None:
    options: dict[str, Any] = {"choice_count": 1, "logprobs": False}
    assert _body(ChatAnswer(IDENTITY, **options), STOPPED)["choices"][0]["stop_reason"] == "END"
    assert _body(CompletionAnswer(IDENTITY, **options), STOPPED)["choices"][0]["stop_reason"] == "END"
    assert _data(ChatStream(IDENTITY, **options), STOPPED)[-1]["choices"][0]["stop_reason"] == "END"
    assert _data(CompletionStream(IDENTITY, **options), STOPPED)[-1]["choices"][0]["stop_reason"] == "END"
    message = _body(MessagesAnswer(IDENTITY), STOPPED)
    (end,) = (event["delta"] for event in _data(MessagesStream(IDENTITY), STOPPED) if event["type"] == "message_delta")
    for found in (message, end):
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "END")


def test_two_calls_without_arguments_do_not_break_a_streamed_message() -> None:
    heads = [calling(call(index, id=f"c{index}", name="f")) for index in (0, 1)]
    ends = [calling(call(index, arguments_text="{}")) for index in (0, 1)]
    finish = stopped("TOOL_CALLS")
    events = _data(MessagesStream(IDENTITY), [*heads, *ends, finish, finished()])
    assert [event["content_block"]["id"] for event in events if "content_block" in event] == ["c0", "c1"]
    assert events[-1]["type"] == "message_stop"
