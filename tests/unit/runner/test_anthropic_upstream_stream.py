"""Streams of Anthropic's Messages API as events."""

import json
from typing import Any

import pytest
from kit.failures import fails
from kit.messages_provider import (
    MessagesReply,
    events_of,
    redacted_block,
    signature_of,
    text_block,
    thinking_block,
    tool_block,
)

from runner_svc.anthropic_upstream.anthropic_stream import MessagesReader
from runner_svc.openai_upstream.sse import ErrorPayload
from weft.api.common.v1 import event_pb2, usage_pb2
from weft.dispatch.frames import is_content
from weft.kernel.errors.reasons import Reason


def _payloads(reply: MessagesReply) -> list[bytes]:
    return [json.dumps(event).encode() for event in events_of(reply, "m")]


def _read(reply: MessagesReply, *, at_once: bool = False) -> list[event_pb2.InferenceEvent]:
    reader, frames = MessagesReader(whole=False), []
    parts = [_payloads(reply)] if at_once else [[payload] for payload in _payloads(reply)]
    for part in parts:
        frames += reader.read(part)
    if not reader.ended:
        frames.append(reader.finish())
    return [event for frame in frames for event in frame]


def _texts(events: list[event_pb2.InferenceEvent], name: str = "text") -> str:
    return "".join(getattr(event.delta, name) for event in events)


def _finish(events: list[event_pb2.InferenceEvent]) -> int:
    return next(event.delta.finish_reason for event in events if event.delta.finish_reason)


@pytest.mark.parametrize("at_once", [False, True])
def test_text_and_usage_with_both_kinds_of_cached_tokens_are_passed_on(at_once: bool) -> None:
    events = _read(MessagesReply(), at_once=at_once)
    assert _texts(events) == "one two three"
    assert _finish(events) == event_pb2.FINISH_REASON_STOP
    assert events[-2].usage == usage_pb2.Usage(
        prompt_tokens=2_037, completion_tokens=15, cached_prompt_tokens=30, cache_write_prompt_tokens=2_000
    )
    assert events[-1].finished.receipt.usage == events[-2].usage


@pytest.mark.parametrize("at_once", [False, True])
def test_thinking_is_reasoning_with_a_signature_before_the_text(at_once: bool) -> None:
    events = _read(MessagesReply(blocks=(thinking_block("Let me ", "see."), text_block("Yes."))), at_once=at_once)
    assert (_texts(events, "reasoning"), _texts(events)) == ("Let me see.", "Yes.")
    told = [event.delta.ListFields()[0][0].name for event in events if is_content(event.delta)]
    assert told == ["reasoning", "reasoning", "reasoning_signature", "text"]
    assert _texts(events, "reasoning_signature") == signature_of("Let me see.")


def test_redacted_thinking_and_signatures_of_hidden_thinking_are_passed_on() -> None:
    events = _read(MessagesReply(blocks=(redacted_block("xyz"), thinking_block(), text_block("Yes."))))
    told = [event.delta.ListFields()[0][0].name for event in events if is_content(event.delta)]
    assert told == ["redacted_reasoning", "reasoning_signature", "text"]
    assert (_texts(events, "redacted_reasoning"), _texts(events, "reasoning")) == ("xyz", "")


def test_tool_calls_are_numbered_in_order_and_missing_arguments_become_an_empty_object() -> None:
    blocks = (text_block("I look."), tool_block("t1", "look", '{"at":', ' "it"}'), tool_block("t2", "wait"))
    events = _read(MessagesReply(blocks=blocks, stop_reason="tool_use"))
    calls: dict[int, list[str]] = {}
    for event in events:
        for call in event.delta.tool_calls:
            found = calls.setdefault(call.index, ["", "", ""])
            found[0] += call.id
            found[1] += call.name
            found[2] += call.arguments_text
    assert calls == {0: ["t1", "look", '{"at": "it"}'], 1: ["t2", "wait", "{}"]}
    assert _finish(events) == event_pb2.FINISH_REASON_TOOL_CALLS


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("end_turn", event_pb2.FINISH_REASON_STOP),
        ("stop_sequence", event_pb2.FINISH_REASON_STOP),
        ("pause_turn", event_pb2.FINISH_REASON_STOP),
        ("max_tokens", event_pb2.FINISH_REASON_LENGTH),
        ("model_context_window_exceeded", event_pb2.FINISH_REASON_LENGTH),
        ("refusal", event_pb2.FINISH_REASON_CONTENT_FILTER),
    ],
)
def test_every_stop_reason_is_a_finish_reason(word: str, reason: int) -> None:
    assert _finish(_read(MessagesReply(stop_reason=word))) == reason


def test_unknown_stop_reason_is_a_warning_and_a_truncated_stream_a_provider_error() -> None:
    events = _read(MessagesReply(stop_reason="moonshine"))
    assert ["moonshine" in event.warning.message for event in events if event.HasField("warning")] == [True]
    reader = MessagesReader(whole=False)
    for payload in _payloads(MessagesReply())[:-2]:
        reader.read([payload])
    with fails(Reason.BACKEND_PROTOCOL_ERROR):
        reader.finish()


@pytest.mark.parametrize(
    ("kind", "begun", "reason"),
    [
        ("overloaded_error", False, Reason.BACKEND_NOT_READY),
        ("rate_limit_error", False, Reason.BACKEND_NOT_READY),
        ("overloaded_error", True, Reason.BACKEND_ERROR),
        ("invalid_request_error", False, Reason.BACKEND_REJECTED),
        ("api_error", False, Reason.BACKEND_ERROR),
    ],
)
def test_stream_error_has_its_reason(kind: str, begun: bool, reason: Reason) -> None:
    reader = MessagesReader(whole=False)
    payloads = _payloads(MessagesReply(breaks_with=kind))
    for payload in payloads[: -1 if begun else 2]:
        reader.read([payload])
    with fails(reason):
        reader.read([ErrorPayload(payloads[-1])])


@pytest.mark.parametrize(
    "event",
    [
        {"type": "content_block_delta", "index": 5, "delta": {"type": "input_json_delta", "partial_json": "{}"}},
        {"type": 3},
        [],
    ],
)
def test_malformed_event_is_a_provider_error(event: Any) -> None:
    with fails(Reason.BACKEND_PROTOCOL_ERROR):
        MessagesReader(whole=False).read([json.dumps(event).encode()])


def test_unknown_events_are_ignored() -> None:
    reader = MessagesReader(whole=False)
    payloads = _payloads(MessagesReply())
    payloads.insert(2, b'{"type": "mood", "mood": "fine"}')
    frames = [frame for payload in payloads for frame in reader.read([payload])]
    assert _texts([event for frame in frames for event in frame]) == "one two three"
