"""Texts that arrive together become one delta with their lengths, which stands for a delta with each of them."""

from typing import Any

import msgspec
import pytest

from runner_svc.chat.turn import RepetitionWatch
from runner_svc.openai_upstream.openai_stream import DONE, StreamReader
from runner_svc.policy.repetition import RepetitionLimits, TextureLimits
from runner_svc.servicers.inference import AnswerWriter
from weft.api.common.v1 import chat_pb2, event_pb2
from weft.dispatch.frames import MAX_JOINED_CHARS, MAX_JOINED_TEXTS, Frame, apart
from weft.dispatch.token_counts import TokenCounter


def _chunk(**fields: Any) -> bytes:
    return msgspec.json.encode(fields)


def _piece(index: int = 0, finish_reason: str | None = None, **delta: Any) -> bytes:
    return _chunk(choices=[{"index": index, "delta": delta, "finish_reason": finish_reason}])


TEXT, OTHER = _piece(content="a line that comes again\n"), _piece(1, content="another choice 😀")
THOUGHT, PROGRESS = _piece(reasoning_content="hm"), _chunk(prompt_progress={"total": 9, "processed": 5})
CALL = _piece(tool_calls=[{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}])
USAGE = _chunk(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 4})
ENDS = [_piece(finish_reason="stop"), _piece(1, finish_reason="stop")]
LOGPROBS = _chunk(
    choices=[{"index": 0, "delta": {"content": "b"}, "logprobs": {"content": [{"token": "b", "logprob": -1.0}]}}]
)
READS = {
    "text alone": [TEXT, TEXT, TEXT],
    "one text": [TEXT],
    "text and the end": [TEXT, TEXT, *ENDS, USAGE, DONE],
    "the end in the last text": [TEXT, TEXT, _piece(content="b", finish_reason="stop"), ENDS[1], USAGE, DONE],
    "two choices": [TEXT, TEXT, OTHER, OTHER, TEXT, OTHER],
    "text after other things": [PROGRESS, TEXT, TEXT],
    "text before other things": [TEXT, TEXT, PROGRESS, TEXT, THOUGHT, CALL, TEXT],
    "an empty piece between": [TEXT, _piece(), TEXT],
    "a piece that names the role": [TEXT, _piece(role="assistant", content="b"), TEXT],
    "log probabilities between": [TEXT, TEXT, LOGPROBS, LOGPROBS, TEXT],
}
FIRST = _piece(role="assistant", content="first ")


def _frames(name: str, *, joins: bool, whole: bool = False) -> list[Frame]:
    reader = StreamReader(2, 2, whole=whole, joins_texts=joins)
    return [*reader.read([FIRST]), *reader.read(READS[name])]


@pytest.mark.parametrize("name", READS)
def test_joined_texts_equal_the_texts_read_separately(name: str) -> None:
    assert [apart(frame) for frame in _frames(name, joins=True)] == _frames(name, joins=False)


def test_consecutive_texts_of_one_choice_are_one_delta() -> None:
    """The negative control of the comparison: there is something to take apart."""
    _, frame = _frames("two choices", joins=True)
    assert [(event.delta.index, len(event.delta.piece_lengths)) for event in frame] == [(0, 2), (1, 2), (0, 0), (1, 0)]
    _, (alone,) = _frames("one text", joins=True)
    assert alone == event_pb2.InferenceEvent(delta=event_pb2.Delta(text="a line that comes again\n"))


def test_non_streamed_answer_has_no_text_lengths() -> None:
    for name in READS:
        frames = _frames(name, joins=True, whole=True)
        assert frames == _frames(name, joins=False, whole=True)
        assert not any(event.delta.piece_lengths for frame in frames for event in frame)


def _read(texts: list[str]) -> list[Frame]:
    reader = StreamReader(1, 1, joins_texts=True)
    reader.read([FIRST])
    return reader.read([_piece(content=text) for text in texts])


def _texts(frames: list[Frame]) -> list[list[str]]:
    return [[event.delta.text for event in apart(frame)] for frame in frames]


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([1] * MAX_JOINED_TEXTS, [MAX_JOINED_TEXTS]),
        ([1] * (MAX_JOINED_TEXTS + 1), [MAX_JOINED_TEXTS, 1]),
        ([1] * (2 * MAX_JOINED_TEXTS + 5), [MAX_JOINED_TEXTS, MAX_JOINED_TEXTS, 5]),
        ([MAX_JOINED_CHARS - 1, 1], [2]),
        ([MAX_JOINED_CHARS - 1, 2, 3], [1, 2]),
        ([2, MAX_JOINED_CHARS * 2, 2, 2], [1, 1, 2]),
    ],
)
def test_message_joins_texts_only_up_to_the_limits(lengths: list[int], counts: list[int]) -> None:
    given = ["ä" * length for length in lengths]
    frames = _read(given)
    assert [len(texts) for texts in _texts(frames)] == counts
    assert [text for texts in _texts(frames) for text in texts] == given
    for frame in frames:
        (event,) = frame
        assert len(event.delta.piece_lengths) <= MAX_JOINED_TEXTS
        assert len(event.delta.text) <= MAX_JOINED_CHARS or not event.delta.piece_lengths


@pytest.mark.parametrize("name", READS)
def test_frame_observers_see_the_same_with_joined_texts(name: str) -> None:
    limits = RepetitionLimits(prose=TextureLimits(lines=2, characters=100, repeats=5))
    seen = []
    for joins in (False, True):
        counter, watch = (
            TokenCounter(chat_pb2.ChatPayload(), whole=False),
            RepetitionWatch(chat_pb2.ChatPayload(), kills=False, limits=limits),
        )
        warnings = []
        for frame in _frames(name, joins=joins) * 20:
            counter.note(frame)
            warnings.append(watch.look(frame))
        seen.append((counter.usage, warnings))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("joined_texts", [False, True])
@pytest.mark.parametrize("name", READS)
def test_joined_texts_are_sent_only_to_a_dispatcher_that_reads_them(name: str, joined_texts: bool) -> None:
    started = event_pb2.InferenceEvent(started=event_pb2.Started(runner="r"))
    writer = AnswerWriter(started, whole=False, joined_texts=joined_texts)
    written = [list(message.events) for message in filter(None, map(writer.message_of, _frames(name, joins=True)))]
    first, *rest = _frames(name, joins=joined_texts)
    assert written == [[started, *first], *rest]
