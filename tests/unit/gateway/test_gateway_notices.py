"""Signals, warnings and tools that the mesh runs: comments, chunks on request, and members of a unary answer."""

import json
from typing import Any, cast

import pytest
from answer_events import IDENTITY, Event, data_of, end, piece, started

from gateway.answers.answer_builder import MAX_NOTICES
from gateway.openai.chat_answer import ChatAnswer, ChatStream
from gateway.openai.completions import CompletionAnswer, CompletionStream
from weft.api.common.v1 import event_pb2, signal_pb2, warning_pb2
from weft.kernel.text.json_objects import to_json_object


def signal(name: str = "NEEDS_EXTERNAL_INFO", **arguments: object) -> Event:
    return Event(signal=signal_pb2.Signal(name=name, arguments=to_json_object(arguments, "arguments")))


def warning(field: str = "mirostat", code: int = warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER) -> Event:
    told = warning_pb2.Warning(code=cast("Any", code), field=field, message="was not used")
    return Event(warning=told)


def tool_call(name: str = "files.read") -> Event:
    arguments = to_json_object({"path": "a", "lines": [1, 2.5]}, "arguments")
    return Event(tool_call=event_pb2.ToolCall(id="call-1", name=name, arguments=arguments))


def tool_result(content: str = "text", *, failed: bool = False) -> Event:
    return Event(tool_result=event_pb2.ToolResult(id="call-1", content=content, failed=failed))


def chat_stream(*, include_events: bool = False) -> ChatStream:
    return ChatStream(IDENTITY, choice_count=1, logprobs=False, include_usage=True, include_events=include_events)


def completion_stream(*, include_events: bool = False) -> CompletionStream:
    return CompletionStream(IDENTITY, choice_count=1, logprobs=False, include_usage=True, include_events=include_events)


def notices_of(encoded: bytes) -> list[dict[str, Any]]:
    return [chunk["weft"] for chunk in data_of(encoded) if "weft" in chunk]


def comments_of(encoded: bytes) -> list[str]:
    return [part for part in encoded.decode().split("\n\n") if part.startswith(":")]


NOTICES = [
    pytest.param(
        signal(query="weather", urgent=True),
        ": signal NEEDS_EXTERNAL_INFO",
        {"signal": {"name": "NEEDS_EXTERNAL_INFO", "arguments": {"query": "weather", "urgent": True}}},
        id="a signal",
    ),
    pytest.param(
        warning(),
        ": warning unsupported_parameter field=mirostat was not used",
        {"warning": {"code": "unsupported_parameter", "field": "mirostat", "message": "was not used"}},
        id="a warning",
    ),
    pytest.param(
        warning("", 999),
        ": warning unspecified was not used",
        {"warning": {"code": "unspecified", "field": None, "message": "was not used"}},
        id="a warning of a newer release",
    ),
    pytest.param(
        tool_call(),
        ": tool files.read",
        {"tool_call": {"id": "call-1", "name": "files.read", "arguments": {"path": "a", "lines": [1, 2.5]}}},
        id="a tool call",
    ),
    pytest.param(
        tool_result(),
        ": tool done",
        {"tool_result": {"id": "call-1", "failed": False, "content": "text"}},
        id="a tool's answer",
    ),
    pytest.param(
        tool_result("no\nsuch file", failed=True),
        ": tool failed",
        {"tool_result": {"id": "call-1", "failed": True, "content": "no\nsuch file"}},
        id="a tool that failed",
    ),
]


@pytest.mark.parametrize("stream", [chat_stream, completion_stream])
@pytest.mark.parametrize(("event", "comment", "member"), NOTICES)
def test_notice_is_a_comment_and_a_chunk_only_on_request(
    stream: Any, event: Event, comment: str, member: dict[str, object]
) -> None:
    frame = [started(), piece("a"), event, piece("b"), *end()]
    plain, told = stream().encode(frame), stream(include_events=True).encode(frame)
    assert comments_of(plain)[0] == comment
    assert notices_of(plain) == []
    assert notices_of(told) == [member]
    assert not [line for line in comments_of(told) if line == comment]
    chunk = next(chunk for chunk in data_of(told) if "weft" in chunk)
    assert chunk["choices"] == []
    assert (chunk["id"], chunk["model"], chunk["created"]) == ("chatcmpl-1", "tiny", 1_700_000_000)
    # Without the chunk, the two streams are equal.
    assert [chunk for chunk in data_of(told) if "weft" not in chunk] == data_of(plain)


def test_requesting_notices_has_no_effect_without_any() -> None:
    frame = [started(), piece("a"), *end()]
    assert chat_stream(include_events=True).encode(frame) == chat_stream().encode(frame)


@pytest.mark.parametrize("event", [tool_call(), tool_result(), signal()], ids=["call", "result", "signal"])
@pytest.mark.parametrize("include_events", [False, True])
def test_side_effect_starts_the_answer_before_any_text(event: Event, include_events: bool) -> None:
    encoder = chat_stream(include_events=include_events)
    assert encoder.encode([started(), warning()]) == b""
    begun = [encoder.has_content]
    encoded = encoder.encode([event])
    assert [*begun, encoder.has_content] == [False, True]
    assert len(notices_of(encoded)) + len(comments_of(encoded)) == 2, "what was held, then the event"
    assert b"warning" in encoded


@pytest.mark.parametrize("include_events", [False, True])
def test_warning_of_a_failed_attempt_is_dropped(include_events: bool) -> None:
    encoder = chat_stream(include_events=include_events)
    encoded = encoder.encode([started("one"), warning("first"), started("two"), warning("second"), piece("a"), *end()])
    assert b"first" not in encoded
    assert encoded.count(b"second") == 1
    answer = ChatAnswer(IDENTITY, choice_count=1, logprobs=False)
    answer.add([started("one"), warning("first"), started("two"), warning("second"), *end()])
    assert [told["field"] for told in json.loads(answer.body())["warnings"]] == ["second"]


def test_held_warnings_are_capped_like_those_of_a_whole_answer() -> None:
    encoder = chat_stream()
    assert encoder.encode([started(), *(warning(str(n)) for n in range(MAX_NOTICES + 9))]) == b""
    assert encoder.encode([piece("a")]).count(b": warning") == MAX_NOTICES


def test_warning_without_any_content_is_sent_with_the_end() -> None:
    encoded = chat_stream().encode([started(), warning(), *end()])
    assert comments_of(encoded)[0].startswith(": warning unsupported_parameter")
    assert encoded.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("name", ["a\x1b]0;owned\x07", "a\x00b\x9b2J", "a\u2028\u202eb"])
def test_names_in_comments_cannot_control_the_terminal(name: str) -> None:
    event = Event(tool_call=event_pb2.ToolCall(id="call-1", name=name))
    (comment,) = comments_of(chat_stream().encode([event]))
    assert comment.startswith(": tool a")
    assert comment.isprintable()


def test_notice_cannot_inject_an_event_or_exceed_the_line_limit() -> None:
    hostile = "x\r\n\r\ndata: {}\n\n" + "y" * 5000
    for event in (signal(hostile), tool_call(hostile), warning(hostile)):
        comments = chat_stream().encode([started(), piece("a"), event]).decode()
        told = comments[comments.index("\n: ") + 1 :]
        assert told.count("\n") == 2
        assert "\r" not in told
        assert len(told) < 300
        chunk = chat_stream(include_events=True).encode([started(), piece("a"), event])
        assert len(data_of(chunk)) == 3


@pytest.mark.parametrize("answer_type", [ChatAnswer, CompletionAnswer])
def test_whole_answer_has_only_its_own_notices(answer_type: Any) -> None:
    answer = answer_type(IDENTITY, choice_count=1, logprobs=False)
    answer.add([started(), warning(), tool_call(), tool_result(), signal(a=1), piece("a"), *end()])
    document = json.loads(answer.body())
    assert document["warnings"] == [{"code": "unsupported_parameter", "field": "mirostat", "message": "was not used"}]
    assert document["signals"] == [{"name": "NEEDS_EXTERNAL_INFO", "arguments": {"a": 1}}]
    assert len(answer.warnings) == 1
    bare = answer_type(IDENTITY, choice_count=1, logprobs=False)
    bare.add([started(), piece("a"), *end()])
    assert set(document) - set(json.loads(bare.body())) == {"warnings", "signals"}


def test_whole_answer_has_a_bounded_number_of_notices() -> None:
    answer = ChatAnswer(IDENTITY, choice_count=1, logprobs=False)
    many = [event for n in range(MAX_NOTICES + 9) for event in (signal(n=n), warning(str(n)))]
    answer.add([started(), *many, *end()])
    document = json.loads(answer.body())
    assert (len(document["signals"]), len(document["warnings"])) == (MAX_NOTICES, MAX_NOTICES)
    assert document["signals"][0]["arguments"] == {"n": 0}
