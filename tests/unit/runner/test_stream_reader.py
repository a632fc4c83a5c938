"""Chunks of a backend's stream, as events."""

from typing import Any

import msgspec
import pytest

from runner_svc.backends.openai_stream import DONE, StreamReader
from weft.api.common.v1 import event_pb2
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


def _chunk(**fields: Any) -> bytes:
    return msgspec.json.encode(fields)


def _text(text: str, index: int = 0) -> bytes:
    return _chunk(choices=[{"index": index, "delta": {"content": text}, "finish_reason": None}])


def _end(reason: str = "stop", index: int = 0) -> bytes:
    return _chunk(choices=[{"index": index, "delta": {}, "finish_reason": reason}])


def _usage(prompt: int, completion: int, cached: int = 0) -> bytes:
    return _chunk(
        choices=[],
        usage={
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
        timings={"prompt_ms": 100.0, "predicted_ms": 50.0},
    )


def test_the_first_content_is_alone_in_its_frame_and_the_rest_is_one_frame() -> None:
    role = _chunk(choices=[{"index": 0, "delta": {"role": "assistant", "content": None}}])
    frames = StreamReader(1, 1).read([role, _text("a"), _text("b"), _text("c"), _end()])
    assert [[event.delta.text for event in frame] for frame in frames] == [["a"], ["b", "c", ""]]


def test_prefill_progress_before_the_content_comes_first_in_a_frame_of_its_own() -> None:
    progress = _chunk(choices=[], prompt_progress={"total": 100, "cache": 10, "processed": 60})
    frames = StreamReader(1, 1).read([progress, _text("a")])
    assert [frame[0].WhichOneof("event") for frame in frames] == ["progress", "delta"]
    assert frames[0][0].progress.processed_tokens == 60


def test_tool_calls_reasoning_and_logprobs_are_carried() -> None:
    delta = {
        "reasoning_content": "hm",
        "tool_calls": [{"index": 1, "id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a"'}}],
    }
    logprobs = {
        "content": [
            {
                "token": "x",
                "logprob": -0.5,
                "bytes": [120],
                "top_logprobs": [{"token": "y", "logprob": -1.0, "bytes": None}],
            }
        ]
    }
    (frame,) = StreamReader(1, 1).read([_chunk(choices=[{"index": 0, "delta": delta, "logprobs": logprobs}])])
    event = frame[0].delta
    assert event.reasoning == "hm"
    assert (event.tool_calls[0].index, event.tool_calls[0].id, event.tool_calls[0].name) == (1, "c1", "f")
    assert event.tool_calls[0].arguments_text == '{"a"'
    assert event.logprobs[0].raw_bytes == b"x"
    assert not event.logprobs[0].top[0].HasField("raw_bytes")


def test_usage_of_several_choices_adds_up_and_counts_the_shared_prompt_once() -> None:
    """llama-server sends one usage per choice."""
    reader = StreamReader(2, 2)
    reader.read(
        [_text("a"), _end(), _usage(30, 5, cached=29), _text("b", 1), _end("length", 1), _usage(30, 7, 29), DONE]
    )
    receipt = reader.finish()[-1].finished.receipt
    assert (receipt.usage.prompt_tokens, receipt.usage.completion_tokens) == (30, 12)
    assert receipt.usage.cached_prompt_tokens == 29
    assert receipt.gpu_time.ToMilliseconds() == 300
    assert receipt.tokens_per_second == pytest.approx(120.0)


def test_usage_of_several_prompts_adds_up() -> None:
    reader = StreamReader(2, 1)
    for index, tokens in ((0, 3), (1, 4)):
        choice = {"index": index, "text": "x", "finish_reason": "stop"}
        reader.read([_chunk(choices=[choice], usage={"prompt_tokens": tokens, "completion_tokens": 2})])
    usage = reader.finish()[-1].finished.receipt.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 4)


@pytest.mark.parametrize(
    "payload",
    [b"not json", b"[]", b'{"choices": 5}', b'{"choices":[{"delta":{"content":7}}]}', b"<html>", b'{"choices":[{"in'],
)
def test_what_is_not_a_chunk_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(WeftError) as refused:
        StreamReader(1, 1).read([payload])
    assert refused.value.reason is Reason.BACKEND_PROTOCOL_ERROR


def test_an_error_inside_the_stream_is_the_backends_error_with_its_words() -> None:
    with pytest.raises(WeftError) as refused:
        StreamReader(1, 1).read([b'{"error":{"message":"out of tea","type":"server_error","code":500}}'])
    assert refused.value.reason is Reason.BACKEND_ERROR
    assert "out of tea" in refused.value.message


@pytest.mark.parametrize("payloads", [[], [_text("a")], [_text("a"), _end()]])
def test_an_end_without_every_finish_reason_is_a_protocol_error(payloads: list[bytes]) -> None:
    reader = StreamReader(2, 2)
    reader.read(payloads)
    with pytest.raises(WeftError) as refused:
        reader.finish()
    assert refused.value.reason is Reason.BACKEND_PROTOCOL_ERROR


def test_a_null_chunk_is_skipped() -> None:
    """llama-server opens a multi-prompt completion with one."""
    assert StreamReader(1, 1).read([b"null"]) == []


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("stop", event_pb2.FINISH_REASON_STOP),
        ("length", event_pb2.FINISH_REASON_LENGTH),
        ("tool_calls", event_pb2.FINISH_REASON_TOOL_CALLS),
        ("content_filter", event_pb2.FINISH_REASON_CONTENT_FILTER),
    ],
)
def test_finish_reasons_are_translated(word: str, reason: int) -> None:
    (frame,) = StreamReader(1, 1).read([_end(word)])
    assert frame[0].delta.finish_reason == reason
