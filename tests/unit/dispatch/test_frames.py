"""What counts as content: after it nothing is tried again elsewhere."""

import pytest

from weft.api.common.v1 import event_pb2, signal_pb2, usage_pb2, warning_pb2
from weft.dispatch.frames import MAX_JOINED_TEXTS, apart, has_content, texts_of
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

Event = event_pb2.InferenceEvent


@pytest.mark.parametrize(
    "event",
    [
        Event(delta=event_pb2.Delta(text="a")),
        Event(delta=event_pb2.Delta(reasoning="a")),
        Event(delta=event_pb2.Delta(tool_calls=[event_pb2.ToolCallDelta(name="a")])),
        Event(tool_call=event_pb2.ToolCall(id="1")),
        Event(tool_result=event_pb2.ToolResult(id="1")),
        Event(signal=signal_pb2.Signal(name="LOW_CONFIDENCE")),
    ],
)
def test_answer_parts_and_side_effects_are_content(event: Event) -> None:
    assert has_content([Event(started=event_pb2.Started()), event])


@pytest.mark.parametrize(
    "event",
    [
        Event(delta=event_pb2.Delta(finish_reason=event_pb2.FINISH_REASON_STOP)),
        Event(progress=event_pb2.Progress(prompt_tokens=1)),
        Event(warning=warning_pb2.Warning(message="a")),
        Event(usage=usage_pb2.Usage(prompt_tokens=1)),
        Event(),
    ],
)
def test_other_events_are_not_content(event: Event) -> None:
    assert not has_content([event])


def _joined(text: str, *lengths: int) -> event_pb2.Delta:
    return event_pb2.Delta(index=2, text=text, piece_lengths=lengths)


def test_joined_text_is_split_by_character_lengths() -> None:
    assert texts_of(_joined("aä😀b", 1, 2, 1)) == ["a", "ä😀", "b"]
    events = apart([Event(progress=event_pb2.Progress()), Event(delta=_joined("ab", 1, 1)), Event()])
    single = [Event(delta=event_pb2.Delta(index=2, text=text)) for text in "ab"]
    assert events == [Event(progress=event_pb2.Progress()), *single, Event()]


def test_frame_without_joined_texts_is_unchanged() -> None:
    frame = [Event(delta=event_pb2.Delta(text="a"))]
    assert apart(frame) is frame


@pytest.mark.parametrize(
    "delta",
    [
        _joined("abc", 1, 1),
        _joined("abc", 1, 3),
        _joined("abc", 3, 0),
        _joined("abc", 2**32 - 1),
        _joined("", 0),
        _joined("abc", 0),
        _joined("a" * (MAX_JOINED_TEXTS + 1), *[1] * (MAX_JOINED_TEXTS + 1)),
    ],
)
def test_lengths_that_do_not_match_their_text_are_a_runner_error(delta: event_pb2.Delta) -> None:
    with pytest.raises(WeftError) as raised:
        texts_of(delta)
    assert raised.value.reason is Reason.BACKEND_PROTOCOL_ERROR
