"""Every possible stream of a response, with failures at every point, through the stream helper of openai-py."""

import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from answer_events import LOST, Event, Frame, StreamServer, call, calling, piece, started, stopped
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.responses.document import ResponseDocument
from gateway.responses.response_stream import ResponsesStream
from gateway.responses.schema import ResponsesRequest
from weft.api.common.v1 import event_pb2, receipt_pb2, signal_pb2, usage_pb2, warning_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_clock import FakeClock

RESPONSE_ID = "resp_" + "0123456789abcdef01234567"

TEXTS = st.text(st.characters(codec="utf-8"), max_size=6)
LOGPROB = st.builds(
    event_pb2.TokenLogprob,
    token=TEXTS,
    logprob=st.floats(-20, 0) | st.just(float("-inf")),
    top=st.lists(st.builds(event_pb2.TopLogprob, token=TEXTS, logprob=st.floats(-20, 0)), max_size=2),
)
CALL = st.builds(
    event_pb2.ToolCallDelta,
    index=st.integers(0, 2),
    id=st.sampled_from(["", "call_a", "call_b"]),
    name=st.sampled_from(["", "weather", "search"]),
    arguments_text=TEXTS,
)
DELTA = st.builds(
    lambda delta: Event(delta=delta),
    st.builds(
        event_pb2.Delta,
        text=TEXTS,
        reasoning=st.just("") | TEXTS,
        refusal=st.just("") | TEXTS,
        tool_calls=st.lists(CALL, max_size=2),
        logprobs=st.lists(LOGPROB, max_size=2),
    ),
)
NOTICE = st.sampled_from(
    [
        Event(progress=event_pb2.Progress(prompt_tokens=9, processed_tokens=4)),
        Event(signal=signal_pb2.Signal(name="mood")),
        Event(warning=warning_pb2.Warning(code=warning_pb2.WARNING_CODE_REPETITION, message="over and over")),
        Event(tool_call=event_pb2.ToolCall(id="t1", name="clock")),
        Event(tool_result=event_pb2.ToolResult(id="t1", content="noon")),
    ]
)
BEFORE = st.sampled_from(
    [
        Event(queued=event_pb2.Queued(position=1, reason="busy")),
        Event(loading=event_pb2.Loading(stage="reading")),
        Event(started=event_pb2.Started(runner="r1", model="tiny", attempt=1)),
        Event(started=event_pb2.Started(runner="r2", model="small", attempt=2)),
    ]
)
FINISH = st.sampled_from(["STOP", "LENGTH", "TOOL_CALLS", "CONTENT_FILTER"])


SERVER = StreamServer()
CLIENT = openai.OpenAI(base_url="http://gateway/v1", api_key="none", max_retries=0, http_client=SERVER.http)


def stream_of(
    *, logprobs: bool = False, events: bool = False, include: Sequence[str] = (), **fields: object
) -> ResponsesStream:
    included = [*include, "message.output_text.logprobs"] if logprobs else [*include]
    request = ResponsesRequest.model_validate({"model": "chat", "input": "hi", "include": included, **fields})
    document = ResponseDocument(request, RESPONSE_ID, clock=FakeClock(), arrived=999.0, is_stored=False)
    return ResponsesStream(document, include_events=events)


def end(reason: str = "STOP") -> Frame:
    usage = usage_pb2.Usage(prompt_tokens=5, completion_tokens=2)
    return [
        stopped(reason),
        Event(usage=usage),
        Event(finished=event_pb2.Finished(receipt=receipt_pb2.Receipt(model="tiny"))),
    ]


def events_in(body: bytes) -> list[dict[str, Any]]:
    """The events, with their names checked against their types."""
    found = []
    for block in body.decode().split("\n\n"):
        if not block or block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def told_of(encoder: ResponsesStream, *frames: Frame) -> list[dict[str, Any]]:
    return events_in(b"".join(map(encoder.encode, frames)))


def read(body: bytes) -> list[Any]:
    """The events that the stream helper reads from `body`."""
    SERVER.raw = body
    with CLIENT.responses.stream(model="chat", input="hi") as stream:
        return list(stream)


@settings(max_examples=settings().max_examples // 4)
@given(
    before=st.lists(BEFORE, max_size=3),
    said=st.lists(DELTA | NOTICE, max_size=12),
    reason=FINISH,
    logprobs=st.booleans(),
    extras=st.booleans(),
)
def test_stream_helper_accepts_every_complete_answer(
    before: list[Event], said: list[Event], reason: str, logprobs: bool, extras: bool
) -> None:
    encoder = stream_of(logprobs=logprobs, events=extras, include=["metrics"] if extras else [])
    body = b"".join(encoder.encode(frame) for frame in ([event] for event in [*before, *said]))
    body += encoder.encode(end(reason))
    assert encoder.is_done
    told = events_in(body)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    seen = read(body)
    last = seen[-1]
    assert last.response.id == RESPONSE_ID
    assert last.response.output_text == "".join(event.delta.text for event in said)
    assert_items_are_told_once(told)
    if reason in {"STOP", "TOOL_CALLS"}:
        assert last.type == "response.completed"
    else:
        assert last.type == "response.incomplete"
        assert (
            last.response.incomplete_details.reason
            == {
                "LENGTH": "max_output_tokens",
                "CONTENT_FILTER": "content_filter",
            }[reason]
        )


def assert_items_are_told_once(told: Sequence[dict[str, Any]]) -> None:
    """Added, grown and done items agree: chunks add up to items, and items to the last event."""
    final = told[-1]["response"]["output"]
    added = [event["item"] for event in told if event["type"] == "response.output_item.added"]
    done = {event["output_index"]: event["item"] for event in told if event["type"] == "response.output_item.done"}
    assert [item["id"] for item in added] == [item["id"] for item in final]
    assert [done[index] for index in range(len(final))] == final
    assert len({item["id"] for item in final}) == len(final)
    calls = [item["call_id"] for item in final if item["type"] == "function_call"]
    assert len(set(calls)) == len(calls)
    for index, item in enumerate(final):
        pieces = [event for event in told if event.get("output_index") == index and event["type"].endswith(".delta")]
        if item["type"] == "function_call":
            assert "".join(event["delta"] for event in pieces) == item["arguments"]
            continue
        for position, part in enumerate(item["content"]):
            grown = [event for event in pieces if event["content_index"] == position]
            assert "".join(event["delta"] for event in grown) == part.get("text", part.get("refusal"))
            if part["type"] == "output_text":
                assert [entry for event in grown for entry in event["logprobs"]] == part["logprobs"]


@given(before=st.lists(BEFORE, max_size=3), said=st.lists(DELTA | NOTICE, max_size=8), index=st.integers(0, 12))
def test_failure_at_any_point_raises_only_the_api_error(before: list[Event], said: list[Event], index: int) -> None:
    encoder = stream_of()
    frames: list[Frame] = [[event] for event in [*before, *said]] + [end()[:1]]
    body = b"".join(encoder.encode(frame) for frame in frames[:index])
    body += encoder.failure(LOST, "req-1")
    told = events_in(body)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert [event["type"] for event in told[-2:]] == ["response.failed", "error"]
    with pytest.raises(openai.APIError) as caught:
        read(body)
    assert caught.value.code == "worker_lost"
    assert caught.value.message == LOST.message


def test_failed_response_has_the_partial_output_and_the_error() -> None:
    encoder = stream_of()
    body = encoder.encode([piece("Hel")]) + encoder.failure(LOST, "req-1")
    *_, failed, error = events_in(body)
    response = failed["response"]
    assert (response["status"], response["store"]) == ("failed", False)
    assert response["error"] == {"code": "worker_lost", "message": LOST.message}
    assert response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["content"][0]["text"] == "Hel"
    assert (error["code"], error["message"], error["param"]) == (*response["error"].values(), None)
    assert error["request_id"] == "req-1"


def test_failure_while_a_complete_response_is_being_stored_shows_a_failed_response() -> None:
    """Its last response was "completed" in the event `response.failed`, and numbers of events were missing."""
    encoder = stream_of()
    *frame, last = end()
    body = encoder.encode([piece("Hel"), *frame])
    encoder.conclude(last.finished.receipt)
    told = events_in(body + encoder.failure(LOST, "req-1"))
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    response = told[-2]["response"]
    assert (response["status"], response["completed_at"], response["error"]["code"]) == ("failed", None, "worker_lost")


def test_internal_error_hides_its_message() -> None:
    body = stream_of().failure(WeftError(Reason.INTERNAL, "/home/me/secret.py"))
    assert b"secret" not in body


def test_cancelled_response_is_cancelled_and_not_failed() -> None:
    encoder = stream_of()
    body = encoder.encode([piece("Hel")])
    body += encoder.failure(WeftError(Reason.CANCELLED, "the response was cancelled"))
    *_, failed, error = events_in(body)
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "cancelled")
    assert failed["response"]["error"] is None
    assert error["code"] == "cancelled"


def test_text_events_have_the_order_that_clients_check() -> None:
    told = told_of(stream_of(), [piece("Hel")], [piece("lo")], end())
    assert [event["type"] for event in told] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_reasoning_is_a_separate_item_before_the_message() -> None:
    output = told_of(stream_of(), [piece(reasoning="Hm.")], [piece("Hi")], end())[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert output[0]["summary"] == []


def test_interleaved_calls_stay_separate() -> None:
    told = told_of(
        stream_of(),
        [calling(call(0, id="call_1", name="f", arguments_text='{"a'))],
        [calling(call(1, id="call_1", name="g", arguments_text='{"b'))],
        [calling(call(0, arguments_text='":1}'))],
        [calling(call(1, arguments_text='":2}'))],
        end("TOOL_CALLS"),
    )
    first, second = told[-1]["response"]["output"]
    assert (first["name"], first["arguments"]) == ("f", '{"a":1}')
    assert (second["name"], second["arguments"]) == ("g", '{"b":2}')
    assert first["call_id"] == "call_1"
    assert second["call_id"] != "call_1"


def test_only_the_last_growing_item_is_incomplete() -> None:
    calls = [call(index, id=f"c{index}", name="f", arguments_text="{") for index in range(2)]
    response = told_of(stream_of(), [calling(*calls)], end("LENGTH"))[-1]["response"]
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert (response["status"], response["completed_at"]) == ("incomplete", None)


def test_answer_without_text_is_an_empty_message() -> None:
    output = told_of(stream_of(), end())[-1]["response"]["output"]
    assert [(item["type"], item["content"][0]["text"]) for item in output] == [("message", "")]


def test_retry_does_not_start_a_second_response() -> None:
    told = told_of(stream_of(), [started("tiny")], [started("small")], [piece("Hi")], end())
    assert [event["type"] for event in told].count("response.created") == 1
    assert told[0]["response"]["model"] == "tiny"
    assert told[-1]["response"]["model"] == "small"


def test_token_with_half_a_character_keeps_its_probability() -> None:
    half = event_pb2.TokenLogprob(token="", logprob=-1.0, raw_bytes=b"\xf0\x9f")
    rest = event_pb2.TokenLogprob(token="", logprob=-2.0, raw_bytes=b"\x98\x80")
    frames = [[piece(logprobs=[half])], [piece("\N{GRINNING FACE}", logprobs=[rest])], end()]
    told = told_of(stream_of(logprobs=True), *frames)
    delta = next(event for event in told if event["type"] == "response.output_text.delta")
    assert [(entry["logprob"], entry["bytes"]) for entry in delta["logprobs"]] == [
        (-1.0, [0xF0, 0x9F]),
        (-2.0, [0x98, 0x80]),
    ]


def test_unrequested_probabilities_are_an_empty_list() -> None:
    logprobs = [event_pb2.TokenLogprob(token="Hi", logprob=-1.0)]
    told = told_of(stream_of(), [piece("Hi", logprobs=logprobs)], end())
    delta = next(event for event in told if event["type"] == "response.output_text.delta")
    assert delta["logprobs"] == []


def test_metrics_precede_the_end_and_are_sent_only_on_request() -> None:
    def types(**fields: Any) -> list[str]:
        return [event["type"] for event in told_of(stream_of(**fields), end())]

    assert types(include=["metrics"])[-2:] == ["response.metrics", "response.completed"]
    assert types(decoding={"top_k": 1})[-2:] == ["response.metrics", "response.completed"]
    assert "response.metrics" not in types()


def test_unknown_metrics_are_omitted_and_never_null() -> None:
    receipt = receipt_pb2.Receipt(model="tiny", tokens_per_second=42.5)
    receipt.gpu_time.FromMilliseconds(450)
    last = [stopped(text="Hi"), Event(finished=event_pb2.Finished(receipt=receipt))]
    response = told_of(stream_of(include=["metrics"]), last)[-1]["response"]
    metrics = response["metrics"]
    assert response["output_text"] == "Hi"
    assert (metrics["gpu_generate_total_ms"], metrics["engine_tokens_per_second"]) == (450.0, 42.5)
    assert metrics["pool_total_wall_ms"] == 1000.0
    assert set(metrics) == {"gpu_generate_total_ms", "engine_tokens_per_second", "pool_total_wall_ms"}


def _timed_receipt() -> receipt_pb2.Receipt:
    receipt = receipt_pb2.Receipt(model="tiny", tokens_per_second=42.5)
    timings = receipt.engine_timings
    for time, milliseconds in (
        (receipt.queue_wait, 3),
        (receipt.load_wait, 0),
        (receipt.time_to_first_token, 110),
        (receipt.total_time, 480),
        (timings.wall_time, 470),
        (timings.tokenize_time, 2),
        (timings.prefill_time, 100),
        (timings.decode_time, 350),
        (timings.outside_time, 10),
    ):
        time.FromMilliseconds(milliseconds)
    return receipt


def _metrics_of(receipt: receipt_pb2.Receipt) -> dict[str, Any]:
    usage = Event(usage=usage_pb2.Usage(prompt_tokens=7, completion_tokens=15))
    last = [stopped(text="Hi"), usage, Event(finished=event_pb2.Finished(receipt=receipt))]
    metrics: dict[str, Any] = told_of(stream_of(include=["metrics"]), last)[-1]["response"]["metrics"]
    return metrics


def test_self_measuring_accelerator_engine_fills_all_fourteen_metrics() -> None:
    receipt = _timed_receipt()
    receipt.gpu_time.FromMilliseconds(450)
    assert _metrics_of(receipt) == {
        "backend_inference_wall_ms": 470.0,
        "engine_total_wall_ms": 480.0,
        "engine_outside_backend_wall_ms": 10.0,
        "pool_total_wall_ms": 1000.0,
        "engine_queue_wait_ms": 3.0,
        "engine_load_wait_ms": 0.0,
        "engine_time_to_first_token_ms": 110.0,
        "engine_tokenize_ms": 2.0,
        "gpu_time_to_first_token_ms": 100.0,
        "gpu_generate_total_ms": 450.0,
        "gpu_decode_after_first_token_ms": 350.0,
        "engine_prompt_tokens": 7,
        "engine_output_tokens": 15,
        "engine_tokens_per_second": 42.5,
    }


def test_nested_timers_add_up_after_rounding() -> None:
    receipt = receipt_pb2.Receipt(model="tiny")
    receipt.total_time.FromMicroseconds(138_660)
    receipt.engine_timings.wall_time.FromMicroseconds(138_140)
    receipt.engine_timings.outside_time.FromMicroseconds(520)
    metrics = _metrics_of(receipt)
    inner, outside = metrics["backend_inference_wall_ms"], metrics["engine_outside_backend_wall_ms"]
    assert (inner, outside, metrics["engine_total_wall_ms"]) == (138.1, 0.6, 138.7)
    receipt.engine_timings.ClearField("outside_time")
    assert "engine_outside_backend_wall_ms" not in _metrics_of(receipt), "the clocks contradict each other"


def test_device_measurements_are_beside_engine_reports() -> None:
    receipt = _timed_receipt()
    receipt.device_usage.device_time.FromMilliseconds(120)
    receipt.device_usage.energy_millijoules = 36_000
    metrics = _metrics_of(receipt)
    assert (metrics["gpu_device_time_ms"], metrics["gpu_energy_mj"]) == (120.0, 36_000)
    receipt.device_usage.ClearField("energy_millijoules")
    assert "gpu_energy_mj" not in _metrics_of(receipt)


def test_pool_envelope_has_text_items_and_always_metrics() -> None:
    said = piece("Hi", reasoning="Hm.", tool_calls=[call(id="call_a", name="weather", arguments_text="{}")])
    told = told_of(stream_of(envelope="pool"), [said], end("LENGTH"))
    response = told[-1]["response"]
    assert [item["type"] for item in response["output"]] == ["reasoning", "output_text", "function_call"]
    text = response["output"][1]
    assert text == {"type": "output_text", "id": text["id"], "status": "completed", "text": "Hi"}
    assert response["output_text"] == "Hi"
    assert told[-2]["metrics"] == response["metrics"]
    assert None not in response["metrics"].values()


def test_refusal_stays_a_message_in_the_pool_envelope() -> None:
    (item,) = told_of(stream_of(envelope="pool"), [piece(refusal="No.")], end())[-1]["response"]["output"]
    assert (item["type"], item["content"]) == ("message", [{"type": "refusal", "refusal": "No."}])


def test_cpu_engine_times_are_not_gpu_times() -> None:
    metrics = _metrics_of(_timed_receipt())
    assert not [name for name in metrics if name.startswith("gpu_")]
    assert metrics["engine_tokenize_ms"] == 2.0


def test_warnings_and_signals_are_in_the_last_response() -> None:
    warning = warning_pb2.Warning(code=warning_pb2.WARNING_CODE_REPETITION, message="over and over")
    notices = [Event(warning=warning), Event(signal=signal_pb2.Signal(name="mood"))]
    told = told_of(stream_of(), [piece("Hi")], notices, end())
    assert "response.weft" not in {event["type"] for event in told}
    response = told[-1]["response"]
    assert response["warnings"] == [{"code": "repetition", "field": None, "message": "over and over"}]
    assert response["signals"] == [{"name": "mood", "arguments": {}}]


def test_answer_without_a_finish_reason_is_an_error() -> None:
    encoder = stream_of()
    encoder.encode([piece("Hi")])
    with pytest.raises(WeftError) as caught:
        encoder.encode([Event(finished=event_pb2.Finished())])
    assert caught.value.reason is Reason.BACKEND_PROTOCOL_ERROR


def test_response_echoes_the_request_parameters() -> None:
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}, {"type": "web_search"}]
    encoder = stream_of(
        tools=tools,
        instructions="Be terse.",
        metadata={"a": "b"},
        temperature=0.5,
        tool_choice={"type": "function", "name": "f"},
    )
    response = events_in(encoder.encode(end()))[0]["response"]
    assert [tool["name"] for tool in response["tools"]] == ["f"]
    assert (response["instructions"], response["metadata"], response["temperature"]) == ("Be terse.", {"a": "b"}, 0.5)
    assert response["tool_choice"] == {"type": "function", "name": "f"}
    assert (response["status"], response["usage"]) == ("in_progress", None)
