"""Chunks of a backend's stream, as events."""

from typing import Any

import msgspec
import pytest
from kit.failures import fails

from runner_svc.openai_upstream.openai_stream import DONE, StreamReader
from runner_svc.openai_upstream.sse import ErrorPayload
from weft.api.common.v1 import event_pb2, receipt_pb2, warning_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_extensions.engines.engine_host.http_server import LOOP


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


def test_first_content_is_a_separate_frame_and_the_rest_is_one_frame() -> None:
    role = _chunk(choices=[{"index": 0, "delta": {"role": "assistant", "content": None}}])
    frames = StreamReader(1, 1).read([role, _text("a"), _text("b"), _text("c"), _end()])
    assert [[event.delta.text for event in frame] for frame in frames] == [["a"], ["b", "c"]]


def test_whole_answer_merges_simultaneous_chunks_into_one_text() -> None:
    progress = _chunk(choices=[], prompt_progress={"total": 100, "cache": 10, "processed": 60})
    reader = StreamReader(1, 1, whole=True)
    (first,) = reader.read([progress, _text("a"), _text("b"), _text("c")])
    assert [event.WhichOneof("event") for event in first] == ["progress", "delta"]
    assert first[1].delta.text == "abc"
    (second,) = reader.read([_text("d"), _text("e")])
    assert [event.delta.text for event in second] == ["de"]
    assert reader.took_token
    (last,) = reader.read([_text("f"), _end(), _usage(100, 6), DONE])
    assert [event.WhichOneof("event") for event in last] == ["delta", "delta", "usage", "finished"]
    assert last[-1].finished.receipt.usage.completion_tokens == 6


def test_non_text_chunks_of_a_whole_answer_are_not_merged() -> None:
    thought = _chunk(choices=[{"index": 0, "delta": {"reasoning_content": "r"}}])
    likely = _chunk(
        choices=[
            {"index": 0, "delta": {"content": "l"}, "logprobs": {"content": [{"token": "l", "logprob": -1.0}]}},
        ]
    )
    (frame,) = StreamReader(2, 2, whole=True).read(
        [_text("a"), _text("b", 1), _text("c", 1), _text("d"), thought, likely, _text("e"), _end(), _text("f", 1)]
    )
    told = [(event.delta.index, event.delta.text or event.delta.reasoning) for event in frame]
    assert told == [(0, "a"), (1, "bc"), (0, "d"), (0, "r"), (0, "l"), (0, "e"), (1, "f")]
    assert [len(event.delta.logprobs) for event in frame] == [0, 0, 0, 0, 1, 0, 0]


def test_thinking_is_read_under_both_names_and_only_as_text() -> None:
    named = _chunk(choices=[{"index": 0, "delta": {"reasoning": "so"}}])
    usual = _chunk(choices=[{"index": 0, "delta": {"reasoning_content": "then"}}])
    other = _chunk(choices=[{"index": 0, "delta": {"reasoning": {"effort": "low"}, "content": "a"}}])
    frames = StreamReader(1, 1).read([named, usual, other, _end()])
    told = [(event.delta.reasoning, event.delta.text) for frame in frames for event in frame]
    assert told[:3] == [("so", ""), ("then", ""), ("", "a")]


def test_prefill_progress_precedes_content_in_a_separate_frame() -> None:
    progress = _chunk(choices=[], prompt_progress={"total": 100, "cache": 10, "processed": 60})
    frames = StreamReader(1, 1).read([progress, _text("a")])
    assert [frame[0].WhichOneof("event") for frame in frames] == ["progress", "delta"]
    assert frames[0][0].progress.processed_tokens == 60


def test_prompt_completion_report_adds_no_frame() -> None:
    done = _chunk(choices=[], prompt_progress={"total": 100, "cache": 10, "processed": 100})
    begun = _chunk(choices=[], prompt_progress={"total": 100, "cache": 10, "processed": 10})
    reader = StreamReader(1, 1)
    assert reader.read([begun]) == []
    assert reader.read([done]) == []
    assert reader.took_prefill, "it is a sign of life at once"
    (first, last) = reader.read([_text("a"), _end(), DONE])
    assert [event.WhichOneof("event") for event in first] == ["progress", "progress", "delta"]
    assert [event.progress.processed_tokens for event in first[:2]] == [10, 100]
    assert last[-1].HasField("finished")


def test_prompt_progress_reports_are_all_sent_and_few_are_held_back() -> None:
    reader, told = StreamReader(1, 1), []
    for processed in (0, 0, 0, 0, 40, 80, 100):
        frames = reader.read([_chunk(choices=[], prompt_progress={"total": 100, "processed": processed})])
        told.append([event.progress.processed_tokens for frame in frames for event in frame])
    assert told == [[], [], [0, 0, 0], [], [0, 40], [80], []]


def test_prompt_completion_is_reported_if_no_content_follows() -> None:
    done = _chunk(choices=[], prompt_progress={"total": 100, "cache": 10, "processed": 100})
    (frame,) = StreamReader(1, 1).read([done, _end(), _usage(100, 0), DONE])
    assert [event.WhichOneof("event") for event in frame] == ["delta", "progress", "usage", "finished"]


def test_end_events_are_in_the_frame_of_the_preceding_content() -> None:
    reader = StreamReader(1, 1)
    frames = reader.read([_text("a"), _text("b"), _end(), _usage(3, 2), DONE])
    kinds = [[event.WhichOneof("event") for event in frame] for frame in frames]
    assert kinds == [["delta"], ["delta", "delta", "usage", "finished"]]
    assert reader.ended


def test_content_before_an_end_without_a_finish_reason_is_kept() -> None:
    reader = StreamReader(1, 1)
    frames = reader.read([_text("a"), _text("b"), DONE])
    assert [event.delta.text for frame in frames for event in frame] == ["a", "b"]
    assert reader.done
    assert not reader.ended
    warned, end, *_ = reader.finish()
    assert warned.warning.code == warning_pb2.WARNING_CODE_FINISH_REASON_UNKNOWN
    assert end.delta.finish_reason == event_pb2.FINISH_REASON_STOP


def test_tool_calls_reasoning_and_logprobs_are_passed_on() -> None:
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
    assert (event.tool_calls[0].index, event.tool_calls[0].id, event.tool_calls[0].name) == (0, "c1", "f")
    assert event.tool_calls[0].arguments_text == '{"a"'
    assert event.logprobs[0].raw_bytes == b"x"
    assert not event.logprobs[0].top[0].HasField("raw_bytes")


def test_usage_of_several_choices_is_summed_and_the_shared_prompt_counted_once() -> None:
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
    assert receipt.engine_timings.prefill_time.ToMilliseconds() == 200
    assert receipt.engine_timings.decode_time.ToMilliseconds() == 100
    assert not receipt.engine_timings.HasField("tokenize_time")


def _receipt_with(reader: StreamReader, **fields: Any) -> receipt_pb2.Receipt:
    """Returns the receipt of an answer whose last chunk has its usage and these fields."""
    reader.read([_text("a"), _end()])
    reader.read([_chunk(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 11}, **fields)])
    return reader.finish()[-1].finished.receipt


VLLM_METRICS = {
    "time_to_first_token_ms": 40.0,
    "generation_time_ms": 500.0,
    "queue_time_ms": 3.0,
    "mean_itl_ms": 50.0,
    "tokens_per_second": 20.37,
}


def test_vllm_request_times_are_used_without_its_queue_time() -> None:
    receipt = _receipt_with(StreamReader(1, 1), metrics=VLLM_METRICS)
    assert receipt.engine_timings.prefill_time.ToMilliseconds() == 40
    assert receipt.engine_timings.decode_time.ToMilliseconds() == 500
    assert receipt.gpu_time.ToMilliseconds() == 540
    assert receipt.tokens_per_second == pytest.approx(20.0), "from the first token to the last, not from the start"


@pytest.mark.parametrize(
    "metrics",
    [
        None,
        [],
        "fast",
        {},
        {"speculative_decoding": {"num_spec_tokens": 2}},
        {**VLLM_METRICS, "time_to_first_token_ms": None},
        {**VLLM_METRICS, "time_to_first_token_ms": "40 ms"},
        {**VLLM_METRICS, "generation_time_ms": -1.0},
        {**VLLM_METRICS, "generation_time_ms": 1e300},
    ],
)
def test_metrics_of_another_shape_are_ignored(metrics: object) -> None:
    receipt = _receipt_with(StreamReader(1, 1), metrics=metrics)
    assert receipt.usage.completion_tokens == 11
    assert not receipt.HasField("engine_timings")
    assert not receipt.HasField("gpu_time")


def test_metrics_of_one_prompt_are_not_used_for_several() -> None:
    """vLLM tells the times of the last prompt alone."""
    reader = StreamReader(2, 1)
    for index in (0, 1):
        reader.read([_chunk(choices=[{"index": index, "text": "x", "finish_reason": "stop"}])])
    reader.read([_chunk(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 2}, metrics=VLLM_METRICS)])
    assert not reader.finish()[-1].finished.receipt.HasField("engine_timings")


def test_time_missing_from_a_server_is_not_zero() -> None:
    timings = _receipt_with(StreamReader(1, 1), timings={"predicted_ms": 100.0}).engine_timings
    assert timings.decode_time.ToMilliseconds() == 100
    assert not timings.HasField("prefill_time")


def test_usage_of_several_prompts_is_summed() -> None:
    reader = StreamReader(2, 1)
    for index, tokens in ((0, 3), (1, 4)):
        choice = {"index": index, "text": "x", "finish_reason": "stop"}
        reader.read([_chunk(choices=[choice], usage={"prompt_tokens": tokens, "completion_tokens": 2})])
    usage = reader.finish()[-1].finished.receipt.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 4)


def test_incremental_usage_is_not_summed() -> None:
    """Some servers send the choice's usage so far with every chunk."""
    reader = StreamReader(2, 2)
    for index in (0, 1):
        for tokens, finish in ((1, None), (2, None), (3, "stop")):
            choice = {"index": index, "delta": {"content": "x"}, "finish_reason": finish}
            reader.read([_chunk(choices=[choice], usage={"prompt_tokens": 9, "completion_tokens": tokens})])
    usage = reader.finish()[-1].finished.receipt.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (9, 6)
    reader.read([_usage(9, 6)])
    usage = reader.finish()[-1].finished.receipt.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (9, 6), "and once more for all"


@pytest.mark.parametrize(
    "payload",
    [
        *(
            b"not json",
            b"[]",
            b'{"choices": 5}',
            b'{"choices":[{"delta":{"content":7}}]}',
            b"<html>",
            b'{"choices":[{"in',
        ),
        *(b'{"choices":[{"index":%d,"delta":{}}]}' % index for index in (-1, 2**60)),
    ],
)
def test_invalid_chunk_is_a_protocol_error(payload: bytes) -> None:
    with fails(Reason.BACKEND_PROTOCOL_ERROR):
        StreamReader(1, 1).read([payload])


def test_loop_detected_by_an_own_server_ends_the_answer_with_its_reason() -> None:
    reader = StreamReader(1, 1)
    reader.read([_text("again ")])
    with pytest.raises(WeftError) as ended:
        reader.read([_chunk(error={"code": 400, "type": LOOP, "message": "the model repeats itself"})])
    assert (ended.value.reason, ended.value.message) == (Reason.REPEATED_LINE_LOOP, "the model repeats itself")


def test_unsplit_answer_has_a_duration_but_no_first_token_time() -> None:
    reader = StreamReader(1, 1)
    usage = {"prompt_tokens": 10, "completion_tokens": 4}
    told = _chunk(choices=[], usage=usage, timings={"undivided_ms": 2000.0})
    frames = reader.read([_text("a"), _end(), told, DONE])
    receipt = frames[-1][-1].finished.receipt
    assert receipt.gpu_time.ToSeconds() == 2
    assert receipt.tokens_per_second == 2.0
    assert not receipt.engine_timings.HasField("prefill_time")
    assert not receipt.engine_timings.HasField("decode_time")


def test_null_chunk_is_skipped() -> None:
    """llama-server opens a multi-prompt completion with one."""
    assert StreamReader(1, 1).read([b"null"]) == []


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("stop", event_pb2.FINISH_REASON_TOOL_CALLS),
        ("length", event_pb2.FINISH_REASON_LENGTH),
        ("tool_calls", event_pb2.FINISH_REASON_TOOL_CALLS),
        ("content_filter", event_pb2.FINISH_REASON_CONTENT_FILTER),
    ],
)
def test_finish_reasons_are_translated(word: str, reason: int) -> None:
    call = _chunk(choices=[{"delta": {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}}])
    _, frame = StreamReader(1, 1).read([call, _end(word), DONE])
    assert frame[0].delta.finish_reason == reason


def _whole(*payloads: bytes) -> list[Any]:
    reader = StreamReader(1, 1)
    events = [event for frame in reader.read([*payloads]) for event in frame]
    return events if reader.ended else [*events, *reader.finish()]


def _fault(*payloads: bytes) -> WeftError:
    with pytest.raises(WeftError) as refused:
        _whole(*payloads)
    return refused.value


def test_finish_reason_is_held_back_until_the_stream_ends() -> None:
    reader = StreamReader(1, 1)
    first = reader.read([_text("a"), _end()])
    assert not any(event.delta.finish_reason for frame in first for event in frame)
    assert reader.read([DONE])[0][0].delta.finish_reason == event_pb2.FINISH_REASON_STOP


def test_a_message_in_place_of_a_delta_is_read() -> None:
    """It was refused."""
    message = {"role": "assistant", "content": "Hello", "tool_calls": [{"id": "c", "function": {"name": "look"}}]}
    events = _whole(_chunk(choices=[{"index": 0, "message": message, "finish_reason": "stop"}], usage={}), DONE)
    deltas = [event.delta for event in events if event.HasField("delta")]
    assert "".join(delta.text for delta in deltas) == "Hello"
    assert [call.name for delta in deltas for call in delta.tool_calls][:1] == ["look"]
    assert deltas[-1].finish_reason == event_pb2.FINISH_REASON_TOOL_CALLS


@pytest.mark.parametrize(
    "content", ["ab", ["a", "b"], {"type": "text", "text": "ab"}, [{"type": "text", "text": "a"}, "b"]]
)
@pytest.mark.parametrize("name", ["content", "reasoning_content"])
def test_texts_in_a_list_or_in_one_part_are_joined(name: str, content: object) -> None:
    """Lists of strings and single parts were refused."""
    choice = {"delta": {name: content, "tool_calls": [None]}, "finish_reason": "stop"}
    events = _whole(_chunk(choices=[None, choice], usage={}), _chunk(choices={}), DONE)
    assert "".join(event.delta.text + event.delta.reasoning for event in events) == "ab"


def test_a_call_with_nothing_in_it_does_not_end_an_answer_as_a_call() -> None:
    """The answer ended with `tool_calls`, and had none."""
    events = _whole(_chunk(choices=[{"delta": {"content": "a", "tool_calls": [{}]}, "finish_reason": "stop"}]), DONE)
    reasons = [event.delta.finish_reason for event in events if event.delta.finish_reason]
    assert reasons == [event_pb2.FINISH_REASON_STOP]


def test_an_empty_list_of_arguments_is_no_argument() -> None:
    """Servers in PHP write it; it was refused."""
    call = {"id": "c", "function": {"name": "look", "arguments": []}}
    events = _whole(_chunk(choices=[{"delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]), DONE)
    assert "".join(call.arguments_text for event in events for call in event.delta.tool_calls) == "{}"


def test_pieces_in_messages_are_joined_and_a_message_behind_deltas_repeats_them() -> None:
    def texts(*choices: dict[str, object]) -> str:
        events = _whole(*(_chunk(choices=[choice]) for choice in choices), DONE)
        return "".join(event.delta.text for event in events)

    end: dict[str, object] = {"message": {"content": ""}, "finish_reason": "stop"}
    assert texts({"message": {"content": "a"}}, {"message": {"content": "b"}}, end) == "ab"
    whole: dict[str, object] = {"message": {"role": "assistant", "content": "ab"}, "finish_reason": "stop"}
    assert texts({"delta": {"content": "a"}}, {"delta": {"content": "b"}}, whole) == "ab"
    error = _fault(_chunk(choices=[{"message": {"content": 5}, "finish_reason": "stop"}]), DONE)
    assert error.reason is Reason.BACKEND_PROTOCOL_ERROR


@pytest.mark.parametrize(
    "payload",
    [
        b'{"choices":[{"delta":{"content":"\xff"}}]}',
        b'{"choices":[{"delta":{"content":"\xed\xa0\x80"}}]}',
        b'{"choices":[],"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
@pytest.mark.parametrize("asked", ["", "m"])
def test_unencodable_text_is_a_protocol_error(payload: bytes, asked: str) -> None:
    with fails(Reason.BACKEND_PROTOCOL_ERROR) as refused:
        StreamReader(1, 1, asked_model=asked).read([payload])
    refused.value.message.encode()


@pytest.mark.parametrize(
    "payload",
    [
        b'{"error":{"message":"no tea"}}',
        b'{"error":"no tea"}',
        b'{"object":"error","message":"no tea","code":500}',
        b'{"detail":"no tea"}',
        ErrorPayload(b"no tea"),
        ErrorPayload(b'{"message":"no tea"}'),
        ErrorPayload(b'{"type":"error","error":{"type":"overloaded_error","message":"no tea"}}'),
    ],
)
def test_error_in_any_common_format_is_a_backend_error_with_its_message(payload: bytes) -> None:
    error = _fault(_text("a"), payload, _end(), DONE)
    assert (error.reason, error.message) == (Reason.BACKEND_ERROR, "the engine reported: no tea")


def test_different_answering_model_is_warned_about_once_before_the_content() -> None:
    reader = StreamReader(1, 1, asked_model="llama3.2")
    named = {"model": "/models/qwen2.gguf", "choices": [{"delta": {"content": "a"}}]}
    frames = reader.read([_chunk(**named), _chunk(**named), _end(), DONE])
    events = [event for frame in frames for event in frame]
    assert [event.WhichOneof("event") for event in events][:3] == ["warning", "delta", "delta"]
    assert events[0].warning.code == warning_pb2.WARNING_CODE_MODEL_MISMATCH
    assert events[0].warning.message == "the server answered as 'qwen2'; it was asked for 'llama3.2'"
    assert sum(event.HasField("warning") for event in events) == 1
    assert [len(frame) for frame in frames][:2] == [1, 1], "the first content is alone in its frame"


@pytest.mark.parametrize("named", ["llama3.2:latest", "", None, 7])
def test_matching_or_missing_model_name_is_not_warned_about(named: Any) -> None:
    reader = StreamReader(1, 1, asked_model="llama3.2")
    frames = reader.read([_chunk(model=named, choices=[{"delta": {"content": "a"}}]), _end(), DONE])
    assert not any(event.HasField("warning") for frame in frames for event in frame)
