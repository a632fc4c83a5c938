"""Answers of Ollama's API: lines and whole objects from the same events."""

import json
from typing import Any

import pytest
from answer_events import IDENTITY, Event, Frame, call, calling, end, finished, piece, stopped

from weft.api.common.v1 import event_pb2, receipt_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_extensions.ollama.answers import OllamaAnswer, OllamaStream, Shape


def told(*frames: Frame, shape: Shape = Shape.MESSAGE, logprobs: bool = False) -> tuple[list[Any], Any]:
    """The lines and the whole object."""
    stream, answer = OllamaStream(IDENTITY, shape, logprobs=logprobs), OllamaAnswer(IDENTITY, shape)
    raw = b"".join(stream.encode(frame) for frame in frames)
    for frame in frames:
        answer.add(frame)
    whole = json.loads(answer.body())
    return [json.loads(line) for line in raw.splitlines()], whole


def test_unknown_durations_are_left_out() -> None:
    known = receipt_pb2.Receipt()
    known.load_wait.FromMilliseconds(0)
    for receipt, durations in ((receipt_pb2.Receipt(), set()), (known, {"load_duration"})):
        lines, whole = told([piece("Hi")], [stopped(), Event(finished=event_pb2.Finished(receipt=receipt))])
        for found in (lines[-1], whole):
            assert {name for name in found if name.endswith("_duration")} == durations


def test_truncated_call_is_dropped_with_a_warning() -> None:
    cut = call(id="c1", name="weather", arguments_text='{"ci')
    lines, whole = told([calling(cut)], end("LENGTH"))
    for found in (lines[-1], whole):
        assert (found["done_reason"], [one["code"] for one in found["warnings"]]) == ("length", ["tool_call_cut"])
    assert "tool_calls" not in json.dumps([lines, whole])


@pytest.mark.parametrize("encoder", [OllamaStream, OllamaAnswer])
def test_invalid_call_is_an_error(encoder: type[OllamaStream | OllamaAnswer]) -> None:
    answer = encoder(IDENTITY, Shape.MESSAGE)
    wrong = [calling(call(id="c1", name="weather", arguments_text="Oslo")), *end("TOOL_CALLS")]
    with pytest.raises(WeftError) as refused:  # noqa: PT012 - the answer fails where it ends
        if isinstance(answer, OllamaStream):
            answer.encode(wrong)
        else:
            answer.add(wrong)
            answer.body()
    assert refused.value.reason is Reason.TOOL_CALL_INVALID


def test_prompt_is_answered_in_the_response_field() -> None:
    lines, whole = told([piece(reasoning="Let me see.")], [piece("Look")], [piece("ing.")], end(), shape=Shape.RESPONSE)
    assert "".join(one["response"] for one in lines) == whole["response"] == "Looking."
    assert lines[0]["thinking"] == whole["thinking"] == "Let me see."
    assert "message" not in whole
    assert lines[-1]["done_reason"] == "stop"


def test_logprobs_include_their_tokens() -> None:
    token = event_pb2.TokenLogprob(token="Hi", logprob=-0.5, top=[event_pb2.TopLogprob(token="Yo", logprob=-1.5)])
    lines, whole = told([piece("Hi", logprobs=[token])], [stopped(), finished()], logprobs=True)
    assert lines[0]["logprobs"] == whole["logprobs"]
    assert (whole["logprobs"][0]["token"], whole["logprobs"][0]["top_logprobs"][0]["token"]) == ("Hi", "Yo")


def test_failure_is_a_line() -> None:
    line = OllamaStream(IDENTITY, Shape.MESSAGE).failure(WeftError(Reason.BACKEND_PROTOCOL_ERROR, "it died"), "req-1")
    assert line.endswith(b"\n")
    assert json.loads(line) == {"error": "it died", "code": "backend_protocol_error", "request_id": "req-1"}
