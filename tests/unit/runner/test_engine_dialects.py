"""Chunks that are not written as OpenAI writes them."""

import json
import math
from typing import Any

import pytest
from kit.failures import fails

from runner_svc.openai_upstream.openai_stream import DONE, StreamReader
from weft.api.common.v1 import event_pb2
from weft.kernel.errors.reasons import Reason


def _chunk(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def _delta(**delta: Any) -> bytes:
    return _chunk(choices=[{"index": 0, "delta": delta}])


END = _chunk(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])


def _read(*payloads: bytes) -> list[event_pb2.InferenceEvent]:
    reader = StreamReader(1, 1)
    events = [event for payload in [*payloads, DONE] for frame in reader.read([payload]) for event in frame]
    return events if reader.ended else [*events, *reader.finish()]


def _text(events: list[event_pb2.InferenceEvent]) -> str:
    return "".join(event.delta.text for event in events)


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        (None, (0, 0)),
        (5, (0, 0)),
        ("3", (0, 0)),
        ([1, 2], (0, 0)),
        ({"prompt_tokens": 3.0, "completion_tokens": 1.0}, (3, 1)),
        ({"prompt_tokens": 3, "completion_tokens": None}, (3, 0)),
        ({"prompt_tokens": 3, "completion_tokens": None, "total_tokens": 5}, (3, 2)),
        ({"prompt_tokens": -3, "completion_tokens": 1.5, "prompt_tokens_details": 4}, (0, 0)),
        ({"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": -1}}, (3, 0)),
        ({"prompt_tokens": 3, "completion_tokens": 2**60}, (3, 0)),
        (
            {"prompt_tokens": 2**80, "completion_tokens": 1, "completion_tokens_details": {"reasoning_tokens": ""}},
            (0, 1),
        ),
    ],
)
@pytest.mark.parametrize("choices", [[], None])
def test_unreadable_usage_does_not_fail_the_answer(usage: object, counts: tuple[int, int], choices: object) -> None:
    events = _read(_delta(content="hello"), END, _chunk(choices=choices, usage=usage))
    assert _text(events) == "hello"
    found = events[-1].finished.receipt.usage
    assert (found.prompt_tokens, found.completion_tokens) == counts


@pytest.mark.parametrize("timings", [{"prompt_ms": -1}, {"prompt_ms": math.nan}, "fast", {"predicted_ms": 1e308}])
def test_unreadable_timings_do_not_fail_the_answer(timings: object) -> None:
    events = _read(_delta(content="hello"), END, _chunk(choices=[], timings=timings, prompt_progress=timings))
    assert _text(events) == "hello"
    assert not events[-1].finished.receipt.HasField("engine_timings")


@pytest.mark.parametrize("logprob", [None, -math.inf, math.inf, math.nan, "no"])
def test_unreadable_log_probability_does_not_fail_the_answer(logprob: object) -> None:
    token = {"token": "a", "logprob": logprob, "top_logprobs": [{"token": "b", "logprob": logprob, "bytes": [256]}]}
    choice = {"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [token]}}
    (delta, *_) = (event.delta for event in _read(_chunk(choices=[choice]), END))
    assert delta.text == "a"
    assert delta.logprobs[0].logprob == delta.logprobs[0].top[0].logprob == -math.inf


@pytest.mark.parametrize("logprobs", [1, [], {"content": None}, {"content": [None, {"logprob": 1}]}, {"content": "a"}])
def test_log_probabilities_of_another_shape_do_not_fail_the_answer(logprobs: object) -> None:
    choice = {"index": None, "delta": {"content": "a", "role": 5}, "logprobs": logprobs}
    assert _text(_read(_chunk(choices=[choice]), END)) == "a"


def test_content_as_a_list_of_parts_is_text_and_reasoning() -> None:
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    events = _read(
        _delta(role="assistant", content=[thinking]),
        _delta(content=[{"type": "text", "text": "An"}, {"type": "reference", "reference_ids": [1]}]),
        _delta(content="swer"),
        _delta(content=[]),
        END,
    )
    assert _text(events) == "Answer"
    assert "".join(event.delta.reasoning for event in events) == "hm"


@pytest.mark.parametrize("content", [{"text": "a"}, [["a"]], [{"type": "image_url"}], [{"type": "text", "text": 5}], 7])
def test_unreadable_content_is_an_error(content: object) -> None:
    with fails(Reason.BACKEND_PROTOCOL_ERROR):
        _read(_delta(content=content), END)


@pytest.mark.parametrize("name", ["content", "reasoning_content", "refusal"])
def test_emoji_split_over_two_chunks_is_joined(name: str) -> None:
    events = _read(_delta(**{name: "a\ud83d"}), _delta(**{name: ""}), _delta(**{name: "\ude00b"}), END)
    deltas = [event.delta for event in events]
    assert "".join(delta.text + delta.reasoning + delta.refusal for delta in deltas) == "a\N{GRINNING FACE}b"


def test_emoji_split_over_two_argument_chunks_is_joined() -> None:
    pieces = ('{"a":"\ud83d', '\ude00"}')
    calls = [
        _delta(tool_calls=[{"index": 0, "id": "a", "function": {"name": "f", "arguments": text}}]) for text in pieces
    ]
    texts = [call.arguments_text for event in _read(*calls, END) for call in event.delta.tool_calls]
    assert "".join(texts) == '{"a":"\N{GRINNING FACE}"}'


def test_bytes_of_an_emoji_split_over_two_chunks_are_joined() -> None:
    first, second = (
        b'{"choices":[{"index":0,"delta":{"content":"' + part + b'"}}]}' for part in (b"a\xf0\x9f", b"\x98\x80b")
    )
    assert _text(_read(first, second, END)) == "a\N{GRINNING FACE}b"


def test_incomplete_emoji_does_not_fail_the_answer() -> None:
    assert _text(_read(_delta(content="a\ud83d"), END)) == "a\ufffd"
    assert _text(_read(_delta(content="a\ud83d"), _delta(content="b"), END)) == "a\ufffdb"


@pytest.mark.parametrize("name", ["stop_reason", "matched_stop"])
@pytest.mark.parametrize(("value", "found"), [("END", "END"), (128001, ""), (None, "")])
def test_stop_string_reported_by_a_server_is_passed_on(name: str, value: object, found: str) -> None:
    end = _chunk(choices=[{"index": 0, "delta": {}, "finish_reason": "stop", name: value}])
    events = _read(_delta(content="a"), end)
    assert [event.delta.stop_sequence for event in events if event.delta.finish_reason] == [found]
