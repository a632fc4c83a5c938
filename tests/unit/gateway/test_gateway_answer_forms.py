"""Formats of answers that only some clients request, and the order that clients rely on."""

import json
from typing import Any

import pytest
from answer_events import IDENTITY, Frame, call, calling, data_of, finished, piece, stopped

from gateway.openai import embeddings as embedding_payload
from gateway.openai.chat_answer import ChatAnswer, ChatStream
from gateway.openai.completions import CompletionAnswer, CompletionStream
from weft.api.common.v1 import embedding_pb2, usage_pb2
from weft.kernel.errors.error_tree import FieldError


def streamed(frame: Frame, **options: Any) -> list[dict[str, Any]]:
    return data_of(ChatStream(IDENTITY, logprobs=False, **{"choice_count": 1, **options}).encode(frame))


def whole(frame: Frame, **options: Any) -> dict[str, Any]:
    answer = ChatAnswer(IDENTITY, choice_count=1, logprobs=False, **options)
    answer.add(frame)
    document: dict[str, Any] = json.loads(answer.body())
    return document


def test_fields_expected_by_clients_are_present_even_if_empty() -> None:
    document = whole([stopped(text="a"), finished()])
    assert document["system_fingerprint"] is None
    assert document["service_tier"] is None
    (choice,) = document["choices"]
    assert choice["logprobs"] is None
    assert choice["message"] == {"role": "assistant", "content": "a", "refusal": None, "annotations": []}
    usage = document["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_choice_that_starts_first_is_announced_after_those_before_it() -> None:
    chunks = streamed([piece("b", index=2), piece("a", index=0)], choice_count=3)
    seen = [(chunk["choices"][0]["index"], chunk["choices"][0]["delta"]) for chunk in chunks]
    preamble = {"role": "assistant", "content": ""}
    assert seen == [(0, preamble), (1, preamble), (2, preamble), (2, {"content": "b"}), (0, {"content": "a"})]


def test_calls_are_numbered_in_arrival_order() -> None:
    told = [call(5, id="c5", name="f"), call(2, id="c2", name="g"), call(5, arguments_text="{}")]
    frame = [*map(calling, told), piece(index=0)]
    calls = [chunk["choices"][0]["delta"].get("tool_calls") for chunk in streamed(frame)]
    assert [entry[0]["index"] for entry in calls if entry] == [0, 1, 0]
    made = whole([*frame, stopped("TOOL_CALLS"), finished()])["choices"][0]["message"]["tool_calls"]
    assert [entry["id"] for entry in made] == ["c5", "c2"]


def test_legacy_form_calls_one_function_and_uses_its_own_finish_reason() -> None:
    frame = [
        calling(call(index=1, id="c", name="f", arguments_text="{")),
        calling(call(index=1, arguments_text='"a":'), call(index=1, arguments_text="1}")),
        stopped("TOOL_CALLS"),
        finished(),
    ]
    chunks = [chunk["choices"][0] for chunk in streamed(frame, functions=True)]
    told = [chunk["delta"]["function_call"] for chunk in chunks if "function_call" in chunk["delta"]]
    assert told == [{"name": "f", "arguments": "{"}, {"arguments": '"a":1}'}]
    assert chunks[-1]["finish_reason"] == "function_call"
    assert all("tool_calls" not in chunk["delta"] for chunk in chunks)
    (choice,) = whole(frame, functions=True)["choices"]
    assert choice["message"]["function_call"] == {"name": "f", "arguments": '{"a":1}'}
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "function_call"


def test_second_call_dropped_by_the_legacy_form_is_reported() -> None:
    frame = [calling(call(0, id="c", name="f")), calling(call(1, id="d", name="g")), stopped("TOOL_CALLS"), finished()]
    raw = ChatStream(IDENTITY, choice_count=1, logprobs=False, functions=True).encode(frame)
    assert b": warning tool_call_not_run" in raw
    assert b'"g"' not in raw
    (warning,) = whole(frame, functions=True)["warnings"]
    assert warning["code"] == "tool_call_not_run"


def test_text_completion_has_no_tool_calls() -> None:
    frame = [stopped("TOOL_CALLS", "a"), finished()]
    answer = CompletionAnswer(IDENTITY, choice_count=1, logprobs=False)
    answer.add(frame)
    assert json.loads(answer.body())["choices"][0]["finish_reason"] == "stop"
    stream = CompletionStream(IDENTITY, choice_count=1, logprobs=False).encode(frame)
    assert b'"finish_reason":"stop"' in stream
    assert b"tool_calls" not in stream


@pytest.mark.parametrize("found", [3, 1])
def test_vectors_of_an_unrequested_length_are_refused(found: int) -> None:
    vectors = [embedding_pb2.Embedding(index=0, values=[1.0] * found)]
    usage = usage_pb2.Usage()
    with pytest.raises(FieldError, match=f"have {found}") as refused:
        embedding_payload.to_body(vectors, expected=1, model="m", usage=usage, as_base64=False, dimensions=2)
    assert refused.value.field == "dimensions"
    assert embedding_payload.to_body(vectors, expected=1, model="m", usage=usage, as_base64=False, dimensions=found)
