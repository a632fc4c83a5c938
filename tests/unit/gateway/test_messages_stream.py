"""The real Anthropic client reads the stream of any event sequence: an answer, or the expected error."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import anthropic
import pytest
from answer_events import (
    IDENTITY,
    LOST,
    Event,
    Frame,
    StreamServer,
    call,
    calling,
    data_of,
    finished,
    piece,
    started,
    stopped,
)
from hypothesis import given
from hypothesis import strategies as st

from gateway.anthropic.message_stream import MessagesAnswer, MessagesStream
from weft.api.common.v1 import event_pb2, signal_pb2, usage_pb2, warning_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

SERVER = StreamServer()
UNUSUAL = ' {"n": 123456789012345678901234567890, "x": 1e5, "\\u00e9": ["\u2028", null], "n2": -0.0}\n'
"""Arguments that a careless reader changes."""
CLIENT = anthropic.Anthropic(base_url="http://test", api_key="x", max_retries=0, http_client=SERVER.http)


def argued(index: int, arguments: str, *, first: bool) -> Event:
    named = {"id": f"call_{index}", "name": "weather"} if first else {}
    return calling(call(index, arguments_text=arguments, **named))


@dataclass
class StreamEvents:
    """The events of a stream, and how it ended."""

    raw: bytes
    answer: anthropic.types.Message | None = None
    error: anthropic.APIStatusError | None = None
    encoder_error: WeftError | None = None

    @property
    def events(self) -> list[dict[str, Any]]:
        return data_of(self.raw)


def read(raw: bytes) -> StreamEvents:
    SERVER.raw, told = raw, StreamEvents(raw)
    try:
        with CLIENT.messages.stream(model="chat", max_tokens=9, messages=[{"role": "user", "content": "x"}]) as stream:
            told.answer = stream.get_final_message()
    except anthropic.APIStatusError as error:
        told.error = error
    return told


def stream(frames: Sequence[Frame], *, failing_after: int | None = None, estimate: int = 0) -> StreamEvents:
    """Encode frames as an answer does, and read them with the client. The work fails after `failing_after` frames."""
    encoder, out, failure = MessagesStream(IDENTITY, estimate), [], None
    try:
        for index, frame in enumerate(frames):
            if index == failing_after:
                raise LOST
            out.append(encoder.encode(frame))
        if not encoder.is_done:
            raise LOST
    except WeftError as error:
        failure = error
        out.append(encoder.failure(error, "req-1"))
    told = read(b"".join(out))
    told.encoder_error = failure
    return told


def whole(frames: Sequence[Frame]) -> dict[str, Any]:
    """The same answer, unary."""
    answer = MessagesAnswer(IDENTITY)
    for frame in frames:
        answer.add(frame)
    found: dict[str, Any] = json.loads(answer.body())
    return found


def end(finish: str = "STOP") -> Frame:
    counts = usage_pb2.Usage(prompt_tokens=9, completion_tokens=3, cached_prompt_tokens=4)
    return [stopped(finish), Event(usage=counts), finished()]


def blocks(told: StreamEvents) -> list[dict[str, Any]]:
    assert told.answer is not None, told
    return [block.to_dict() for block in told.answer.content]


def reason_of(frames: list[Frame]) -> Reason:
    """Why the unary answer is an error."""
    with pytest.raises(WeftError) as caught:
        whole(frames)
    return caught.value.reason


def called(arguments: str) -> Event:
    return argued(0, arguments, first=True)


WHOLE_CALL = {"type": "tool_use", "id": "call_0", "name": "weather"}
ANSWERS: dict[str, tuple[list[Frame], str, list[dict[str, Any]]]] = {
    "thinking, text and calls": (
        [
            [piece(reasoning="The user "), piece(reasoning="asks.")],
            [piece("Looking it up."), called('{"city": '), argued(0, '"Oslo"}', first=False)],
            [argued(1, "", first=True)],
            end("TOOL_CALLS"),
        ],
        "tool_use",
        [
            {"type": "thinking", "thinking": "The user asks.", "signature": ""},
            {"type": "text", "text": "Looking it up."},
            WHOLE_CALL | {"input": {"city": "Oslo"}},
            {"type": "tool_use", "id": "call_1", "name": "weather", "input": {}},
        ],
    ),
    "signatures and redacted thinking of a provider": (
        [
            [piece(reasoning="Let me "), piece(reasoning="see."), piece(reasoning_signature="s1")],
            [piece(redacted_reasoning="xyz"), piece(reasoning_signature="s2")],
            [piece(reasoning="More."), piece("Yes.", reasoning_signature="s3")],
            end(),
        ],
        "end_turn",
        [
            {"type": "thinking", "thinking": "Let me see.", "signature": "s1"},
            {"type": "redacted_thinking", "data": "xyz"},
            {"type": "thinking", "thinking": "", "signature": "s2"},
            {"type": "thinking", "thinking": "More.", "signature": "s3"},
            {"type": "text", "text": "Yes."},
        ],
    ),
    "cut by the token limit": ([[piece("Hi")], end("LENGTH")], "max_tokens", [{"type": "text", "text": "Hi"}]),
    "filtered": ([[piece("Hi")], end("CONTENT_FILTER")], "refusal", [{"type": "text", "text": "Hi"}]),
    "a refusal in text": (
        [[piece(refusal="I will not.")], end()],
        "refusal",
        [{"type": "text", "text": "I will not."}],
    ),
    "unusual arguments": (
        [[called(UNUSUAL)], end()],
        "tool_use",
        [WHOLE_CALL | {"input": json.loads(UNUSUAL)}],
    ),
}


@pytest.mark.parametrize(("frames", "reason", "content"), ANSWERS.values(), ids=ANSWERS)
def test_streamed_and_unary_answers_have_these_blocks_in_order(
    frames: list[Frame], reason: str, content: list[dict[str, Any]]
) -> None:
    told, document = stream(frames), whole(frames)
    assert (document["stop_reason"], document["content"]) == (reason, content)
    assert told.answer is not None
    assert (told.answer.stop_reason, blocks(told)) == (reason, content)


@pytest.mark.parametrize("arguments", ['{"city": }', '["Oslo"]', '"Oslo"', '{"city": "Oslo"', "{} {}", "NaN", "Oslo"])
def test_non_object_arguments_are_an_error_and_never_an_input(arguments: str) -> None:
    frames = [[called(arguments)], end("TOOL_CALLS")]
    told = stream(frames)
    assert told.encoder_error is not None
    assert told.encoder_error.reason is reason_of(frames) is Reason.TOOL_CALL_INVALID


def test_call_truncated_by_the_token_limit_is_dropped_with_a_warning_unless_it_was_sent() -> None:
    frames = [[piece("Let me see.")], [called('{"city": "Os')], end("LENGTH")]
    document, told = whole(frames), stream(frames)
    assert (document["stop_reason"], [block["type"] for block in document["content"]]) == ("max_tokens", ["text"])
    message = "the answer ended within a call of weather, which was left out"
    assert document["warnings"] == [{"code": "tool_call_cut", "field": None, "message": message}]
    assert told.answer is not None
    assert (told.answer.stop_reason, [block["type"] for block in blocks(told)]) == ("max_tokens", ["text", "tool_use"])


def test_call_without_an_id_gets_one() -> None:
    frames = [[calling(call(0, name="weather", arguments_text="{}"))], end("TOOL_CALLS")]
    for (block,) in (whole(frames)["content"], blocks(stream(frames))):
        assert block["id"].startswith("toolu-")


def test_tokens_of_thinking_are_counted() -> None:
    counts = Event(usage=usage_pb2.Usage(prompt_tokens=12, completion_tokens=9, reasoning_tokens=4))
    frames = [[piece(reasoning="Hm.")], [stopped(), counts, finished()]]
    for usage in (whole(frames)["usage"], stream(frames).events[-2]["usage"]):
        assert usage["output_tokens_details"] == {"thinking_tokens": 4}


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
OBJECTS = st.dictionaries(TEXTS, st.none() | st.booleans() | st.integers() | TEXTS | st.lists(TEXTS, max_size=2))


@st.composite
def calls(draw: st.DrawFn) -> list[Event]:
    """The chunks of one to three calls, some of them invalid, truncated or interleaved."""
    told: list[Frame] = []
    for index in range(draw(st.integers(1, 3))):
        text = draw(
            OBJECTS.map(json.dumps) | st.sampled_from(["", " ", "{} ", '{"a":', "[1]", "{}x", "nonsense", "{,"])
        )
        cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
        edges = [0, *cuts, len(text)]
        told.append(
            [
                argued(index, text[start:stop], first=start == 0 and position == 0)
                for position, (start, stop) in enumerate(pairwise(edges))
            ]
        )
    if draw(st.booleans()):
        return [event for events in told for event in events]
    mixed: list[Event] = []
    while any(told):
        mixed.append(draw(st.sampled_from([events for events in told if events])).pop(0))
    return mixed


NOTICES = st.sampled_from([
    Event(signal=signal_pb2.Signal(name="LOW_CONFIDENCE")),
    Event(warning=warning_pb2.Warning(message="odd\nevent: message_stop")),
    Event(tool_call=event_pb2.ToolCall(id="m1", name="files.read")),
    Event(tool_result=event_pb2.ToolResult(id="m1", content="ok")),
    Event(progress=event_pb2.Progress(prompt_tokens=9, processed_tokens=4, cached_tokens=2)),
    Event(usage=usage_pb2.Usage(prompt_tokens=9, completion_tokens=1)),
])  # fmt: skip
SAYINGS = (
    TEXTS.map(piece)
    | TEXTS.map(lambda text: piece(reasoning=text))
    | TEXTS.map(lambda text: piece(refusal=text))
    | TEXTS.map(lambda text: piece(text, reasoning=text))
    | st.just(piece("of another choice", index=1))
)


@st.composite
def answers(draw: st.DrawFn) -> list[Frame]:
    """The frames of one answer, from the queue to its end, which may be missing."""
    events = draw(st.lists(SAYINGS | NOTICES, max_size=6))
    if draw(st.booleans()):
        told = draw(calls())
        for event in told:
            events.append(event)
            if draw(st.integers(0, 9)) == 0:
                events.append(draw(SAYINGS | NOTICES))
    events += draw(st.lists(SAYINGS, max_size=2))
    finish = draw(st.sampled_from(["STOP", "LENGTH", "TOOL_CALLS", "CONTENT_FILTER", "UNSPECIFIED"]))
    frames = [[Event(queued=event_pb2.Queued(position=1))], [started()]]
    while events:
        size = draw(st.integers(1, 3))
        frames.append(events[:size])
        events = events[size:]
    return [*frames, end(finish)]


@given(answers(), st.none() | st.integers(0, 12))
def test_client_raises_only_the_stream_error(frames: list[Frame], failing_after: int | None) -> None:
    told = stream(frames, failing_after=failing_after)
    names = [event["type"] for event in told.events]
    assert (told.error is None) == (told.encoder_error is None)
    if told.encoder_error is not None:
        assert told.error is not None
        assert isinstance(told.error.body, dict)
        assert told.error.body["error"]["code"] == told.encoder_error.reason.name.lower()
        assert names[-1] == "error"
        assert "message_stop" not in names
        return
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    require_one_block_at_a_time(told.events)
    require_same(told, whole(frames))


def require_one_block_at_a_time(events: Sequence[dict[str, Any]]) -> None:
    """Blocks are numbered from 0, and each ends before the next begins."""
    place, is_open = -1, False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            place, is_open = place + 1, True
        if event["type"].startswith("content_block"):
            assert is_open
            assert event["index"] == place
        if event["type"] == "content_block_stop":
            is_open = False
    assert not is_open


def require_same(told: StreamEvents, document: dict[str, Any]) -> None:
    """The streamed and the unary answer are equal; only text within a call's arguments is sent after them."""
    assert told.answer is not None
    assert told.answer.stop_reason == document["stop_reason"]
    assert told.answer.usage.to_dict() == document["usage"]
    streamed = blocks(told)
    for kind, member in (("text", "text"), ("thinking", "thinking")):
        assert joined(streamed, kind, member) == joined(document["content"], kind, member)
    if not document.get("warnings"):
        assert inputs(streamed) == inputs(document["content"])


def joined(content: Sequence[dict[str, Any]], kind: str, member: str) -> str:
    return "".join(block[member] for block in content if block["type"] == kind)


def inputs(content: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {block["id"]: block["input"] for block in content if block["type"] == "tool_use"}


@given(OBJECTS)
def test_every_argument_prefix_is_parseable_by_the_client(arguments: dict[str, Any]) -> None:
    text = json.dumps(arguments)
    frames = [[argued(0, character, first=index == 0)] for index, character in enumerate(text)]
    told = stream([*frames, end("TOOL_CALLS")])
    assert blocks(told) == [{"type": "tool_use", "id": "call_0", "name": "weather", "input": arguments}]
    sent = [event["delta"]["partial_json"] for event in told.events if event["type"] == "content_block_delta"]
    assert "".join(sent) == text


def test_long_call_is_streamed_while_it_is_generated() -> None:
    text = json.dumps({"file": "x" * 50_000})
    pieces = [text[start : start + 4] for start in range(0, len(text), 4)]
    encoder, sizes = MessagesStream(IDENTITY), []
    for index, part in enumerate(pieces):
        sizes.append(len(encoder.encode([argued(0, part, first=index == 0)])))
    longest, silence = 0, 0
    for size in sizes:
        silence = 0 if size else silence + 1
        longest = max(longest, silence)
    assert longest * 4 <= len(text) // 60


def test_concurrent_tool_calls_are_reported_in_order() -> None:
    frames = [
        [argued(0, '{"a"', first=True)],
        [argued(1, '{"b"', first=True)],
        [argued(0, ":1", first=False), piece("meanwhile"), argued(1, ":2}", first=False)],
        [argued(0, "}", first=False)],
    ]
    assert blocks(stream([*frames, end("TOOL_CALLS")])) == [
        {"type": "tool_use", "id": "call_0", "name": "weather", "input": {"a": 1}},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"b": 2}},
        {"type": "text", "text": "meanwhile"},
    ]


def test_text_between_two_complete_calls_keeps_its_place() -> None:
    frames = [[argued(0, '{"a":1}', first=True)], [piece("and")], [argued(1, "{}", first=True)]]
    assert [block["type"] for block in blocks(stream([*frames, end("TOOL_CALLS")]))] == ["tool_use", "text", "tool_use"]


def test_arguments_after_the_end_of_a_call_are_an_error() -> None:
    frames = [[argued(0, "{}", first=True)], [piece("x")], [argued(0, '{"a":1}', first=False)]]
    told = stream([*frames, end("TOOL_CALLS")])
    assert told.encoder_error is not None
    assert told.encoder_error.reason is Reason.TOOL_CALL_INVALID


def test_first_event_has_prefill_counts_and_the_last_has_final_counts() -> None:
    progress = Event(progress=event_pb2.Progress(prompt_tokens=9, processed_tokens=4, cached_tokens=2))
    told = stream([[progress], [piece("Hi")], end()])
    first, last = told.events[0], told.events[-2]
    assert first["message"]["usage"]["input_tokens"] == 7
    assert first["message"]["usage"]["cache_read_input_tokens"] == 2
    assert last["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 3,
    }


def test_first_event_estimates_counts_not_yet_known_to_the_engine() -> None:
    """Regression: `input_tokens: 0` for every short prompt, and for every engine that reports no prefill."""
    told = stream([[piece("Hi")], end()], estimate=11)
    assert told.events[0]["message"]["usage"] == {
        "input_tokens": 11,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }
    assert told.events[-2]["usage"]["input_tokens"] == 5
    assert told.answer is not None
    counted = Event(progress=event_pb2.Progress(prompt_tokens=9, processed_tokens=4, cached_tokens=2))
    assert stream([[counted], [piece("Hi")], end()], estimate=11).events[0]["message"]["usage"]["input_tokens"] == 7


def test_attempt_before_content_leaves_no_trace() -> None:
    first = started("old")
    second = started("new")
    progress = Event(progress=event_pb2.Progress(prompt_tokens=9))
    cut = stopped("LENGTH")
    told = stream([[first], [progress, cut], [second], [piece("Hi")], end()])
    assert told.answer is not None
    assert told.events[0]["message"]["usage"]["input_tokens"] == 0
    assert (told.answer.model, told.answer.stop_reason) == ("new", "end_turn")


@pytest.mark.parametrize("at", range(7))
def test_failure_at_any_point_is_the_last_event_of_the_stream(at: int) -> None:
    frames = [
        [started()],
        [piece(reasoning="Hm")],
        [piece("Hel")],
        [piece("lo")],
        [argued(0, '{"a":', first=True)],
        [argued(0, "1}", first=False)],
        end("TOOL_CALLS"),
    ]
    told = stream(frames, failing_after=at)
    assert told.error is not None
    assert told.events[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": LOST.message, "code": "worker_lost"},
        "request_id": "req-1",
    }
