"""Frames with their texts beside the messages say the same as frames without."""

from typing import Any

import msgspec
import pytest

from runner_svc.backend.text_frame import TextFrame, others_of, texts_of
from runner_svc.chat.receipt import TokenCounter
from runner_svc.chat.turn import RepetitionWatch
from runner_svc.openai_upstream.stream import DONE, StreamReader
from runner_svc.policy.repetition import RepetitionLimits
from runner_svc.servicers.inference import AnswerWriter
from weft.api.common.v1 import chat_pb2, event_pb2
from weft.api.runner.v1 import generation_service_pb2
from weft.dispatch.frames import Frame


def _chunk(**fields: Any) -> bytes:
    return msgspec.json.encode(fields)


def _piece(index: int = 0, finish_reason: str | None = None, **delta: Any) -> bytes:
    return _chunk(choices=[{"index": index, "delta": delta, "finish_reason": finish_reason}])


TEXT, OTHER = _piece(content="a line that comes again\n"), _piece(1, content="another choice")
THOUGHT, PROGRESS = _piece(reasoning_content="hm"), _chunk(prompt_progress={"total": 9, "processed": 5})
CALL = _piece(tool_calls=[{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}])
USAGE = _chunk(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 4})
ENDS = [_piece(finish_reason="stop"), _piece(1, finish_reason="stop")]
READS = {
    "text alone": [TEXT, TEXT, TEXT],
    "text and the end": [TEXT, TEXT, *ENDS, USAGE, DONE],
    "two choices": [TEXT, TEXT, OTHER, TEXT, OTHER],
    "text after other things": [PROGRESS, TEXT, TEXT],
    "text before other things": [TEXT, TEXT, PROGRESS, TEXT, THOUGHT, CALL, TEXT],
    "an empty piece between": [TEXT, _piece(), TEXT],
    "a piece that names the role": [TEXT, _piece(role="assistant", content="b"), TEXT],
}


def _frames(name: str, *, whole: bool) -> list[Frame]:
    reader = StreamReader(2, 2, whole=whole)
    return [*reader.read([_piece(role="assistant", content="first ")]), *reader.read(READS[name])]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", READS)
def test_the_texts_of_a_frame_are_its_first_events_and_nothing_else_is_in_these(name: str, whole: bool) -> None:
    frames = _frames(name, whole=whole)
    for frame in frames:
        texts, others = texts_of(frame), others_of(frame)
        assert [*frame[: len(texts)], *others] == frame
        for event, text in zip(frame, texts, strict=False):
            plain = type(event)()
            plain.delta.text = text
            plain.delta.index = event.delta.index
            assert event == plain
    content = "".join(event.delta.text for frame in frames for event in frame if not event.delta.index)
    assert content == "first " + "".join(
        msgspec.json.decode(read)["choices"][0]["delta"].get("content", "")
        for read in READS[name]
        if read != DONE and b'"index":0' in read and b"choices" in read and b"tool_calls" not in read
    )


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", READS)
def test_what_looks_at_frames_sees_the_same_with_and_without_the_texts(name: str, whole: bool) -> None:
    payload = chat_pb2.ChatPayload()
    limits = RepetitionLimits().scaled(2, 100)
    seen = []
    for strip in (False, True):
        counter, watch = TokenCounter(payload, whole=whole), RepetitionWatch(kills=False, limits=limits)
        warnings = []
        for frame in _frames(name, whole=whole) * 20:
            looked: Frame = list(frame) if strip else frame
            counter.note(looked)
            warnings.append(watch.look(looked))
        seen.append((counter.usage, warnings))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", READS)
async def test_a_streamed_frame_is_written_as_it_is(name: str) -> None:
    written: list[generation_service_pb2.GenerateResponse] = []

    async def write(message: generation_service_pb2.GenerateResponse) -> None:
        written.append(message)

    writer = AnswerWriter(write, event_pb2.InferenceEvent(started=event_pb2.Started(runner="r")), whole=False)
    frames = _frames(name, whole=False)
    expected = [list(frame) for frame in frames]
    for frame in frames:
        await writer.put(frame)
    assert [list(message.events) for message in written[1:]] == expected[1:]
    assert list(written[0].events)[1:] == expected[0]


def test_a_frame_whose_texts_are_not_its_messages_is_found() -> None:
    """The negative control."""
    frame = TextFrame(0)
    frame.add_text("a")
    frame.texts[0] = "another, and a long one"
    counters = [TokenCounter(chat_pb2.ChatPayload(), whole=True) for _ in range(2)]
    counters[0].note(frame)
    counters[1].note(list(frame))
    assert counters[0].usage != counters[1].usage
