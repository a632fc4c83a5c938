"""Which frames of an answer are sent alone."""

import pytest

from runner_svc.servicers.inference import MAX_HELD_EVENTS, AnswerWriter
from weft.api.common.v1 import event_pb2, warning_pb2
from weft.dispatch.frames import Frame

STARTED = event_pb2.InferenceEvent(started=event_pb2.Started(runner="r"))
PROGRESS = event_pb2.InferenceEvent(progress=event_pb2.Progress(prompt_tokens=9))
WARNING = event_pb2.InferenceEvent(warning=warning_pb2.Warning(message="w"))
CALL = event_pb2.InferenceEvent(tool_call=event_pb2.ToolCall(id="c"))
FINISHED = event_pb2.InferenceEvent(finished=event_pb2.Finished())


def _text(text: str) -> event_pb2.InferenceEvent:
    return event_pb2.InferenceEvent(delta=event_pb2.Delta(text=text))


def _sent(frames: list[Frame], *, whole: bool) -> list[list[str]]:
    writer = AnswerWriter(STARTED, whole=whole)
    messages = filter(None, map(writer.message_of, frames))
    return [[event.delta.text or str(event.WhichOneof("event")) for event in one.events] for one in messages]


ANSWER: list[Frame] = [[_text("a")], [_text("b")], [_text("c"), _text("d")], [FINISHED]]


def test_streamed_answer_is_sent_as_it_arrives() -> None:
    assert _sent(ANSWER, whole=False) == [["started", "a"], ["b"], ["c", "d"], ["finished"]]


def test_whole_answer_sends_its_first_content_immediately_and_the_rest_at_the_end() -> None:
    assert _sent(ANSWER[:-1], whole=True) == [["started", "a"]]
    assert _sent(ANSWER, whole=True) == [["started", "a"], ["b", "c", "d", "finished"]]


@pytest.mark.parametrize("event", [PROGRESS, WARNING, CALL])
def test_other_events_of_a_whole_answer_are_sent_immediately_in_order(event: event_pb2.InferenceEvent) -> None:
    kind = str(event.WhichOneof("event"))
    assert _sent([[event]], whole=True) == [["started", kind]]
    frames: list[Frame] = [[_text("a")], [_text("b")], [event]]
    assert _sent(frames, whole=True) == [["started", "a"], ["b", kind]]


def test_whole_answer_buffers_a_bounded_number_of_chunks() -> None:
    frames: list[Frame] = [[_text("a")], *([_text("x")] for _ in range(MAX_HELD_EVENTS))]
    assert [len(message) for message in _sent(frames, whole=True)] == [2, MAX_HELD_EVENTS]
