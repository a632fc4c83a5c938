"""What counts as content: after it nothing is tried again elsewhere."""

import pytest

from weft.api.common.v1 import event_pb2, signal_pb2, usage_pb2, warning_pb2
from weft.dispatch.frames import has_content

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
def test_parts_of_the_answer_and_effects_of_it_are_content(event: Event) -> None:
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
def test_everything_else_is_none(event: Event) -> None:
    assert not has_content([event])
