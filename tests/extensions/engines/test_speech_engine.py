"""The work on a request for speech, over a speaker of the test, and the sentences of a text."""

import base64
import io
import wave
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from recorded_caller import RecordedCaller
from typing_extensions import override

from weft_extensions.engines.engine_host.http_server import INVALID_FIELD, UNSUPPORTED, Caller, GoneError, RefusedError
from weft_extensions.engines.engine_host.speech import (
    MAX_PIECE_CHARS,
    MAX_SOUND_BYTES,
    SpeechEngine,
    SpeechRequest,
    Voice,
    spoken_pieces,
)

RATE = 8000
SOUND, PROGRESS, DONE = "speech.audio.delta", "work_progress", "speech.audio.done"
TEXT = "This is the first of the sentences. This is the second of the sentences. And the last of the sentences."


class RecordedSpeaker:
    """Half a second of silence per piece of a text; it notes what was said when."""

    voices: Sequence[Voice] = (Voice(name="one"),)

    def __init__(self, note: Callable[[str], None], sample_bytes: int = RATE) -> None:
        self._note = note
        self._sample_bytes = sample_bytes

    def sample_rate(self, voice: str) -> int:
        del voice
        return RATE

    def samples(self, text: str, request: SpeechRequest, caller: Caller) -> Iterator[bytes]:
        del request, caller
        self._note(text)
        if self._sample_bytes:
            yield bytes(self._sample_bytes)


class Stage:
    """An engine with its caller, who notes everything that happened, in order."""

    def __init__(self, sample_bytes: int = RATE, caller: RecordedCaller | None = None) -> None:
        self.caller = caller or RecordedCaller()
        self.engine = SpeechEngine(RecordedSpeaker(self.caller.happened.append, sample_bytes), None, 1)

    def speak(self, text: str = TEXT, form: str = "wav") -> RecordedCaller:
        self.engine.speak(SpeechRequest(text=text, voice="one", format=form), self.caller)
        return self.caller


def _sounds(caller: RecordedCaller) -> list[bytes]:
    return [base64.b64decode(event["audio"]) for event in caller.events(SOUND)]


def test_first_audio_chunk_is_sent_before_the_next_sentence_is_synthesized() -> None:
    happened = Stage().speak().happened
    kinds = [each if isinstance(each, str) else each["type"] for each in happened]
    first, second, third = TEXT.replace("s. ", "s.|").split("|")
    assert kinds == [first, SOUND, PROGRESS, second, SOUND, PROGRESS, third, SOUND, PROGRESS, DONE]


def test_progress_counts_characters_and_the_end_reports_the_length() -> None:
    caller = Stage().speak()
    worked = [event["work_progress"] for event in caller.events(PROGRESS)]
    assert [each["done"] for each in worked] == sorted(each["done"] for each in worked)
    assert {each["total"] for each in worked} == {worked[-1]["done"]}
    assert caller.happened[-1]["usage"] == {"seconds": 1.5}


def test_cancelled_request_ends_between_two_sentences() -> None:
    class LeavesAtTheFirstSound(RecordedCaller):
        @override
        def send(self, event: dict[str, Any]) -> None:
            self.leave()

    stage = Stage(caller=LeavesAtTheFirstSound())
    with pytest.raises(GoneError):
        stage.speak()
    assert stage.caller.happened == [TEXT.split(". ", maxsplit=1)[0] + "."]


@pytest.mark.parametrize(("text", "sample_bytes"), [("\x00\x01", RATE), ("...", 0)])
def test_unspeakable_text_is_refused_before_the_first_byte(text: str, sample_bytes: int) -> None:
    stage = Stage(sample_bytes)
    with pytest.raises(RefusedError, match="input: ") as refused:
        stage.speak(text)
    assert refused.value.kind == INVALID_FIELD
    assert not stage.caller.events(SOUND)


def test_long_recording_is_sent_in_chunks() -> None:
    pieces = _sounds(Stage(3 * MAX_SOUND_BYTES).speak("One sentence of the usual length."))
    assert [len(piece) for piece in pieces] == [MAX_SOUND_BYTES, MAX_SOUND_BYTES, MAX_SOUND_BYTES, 44]


def test_wav_is_readable_by_other_programs() -> None:
    with wave.open(io.BytesIO(b"".join(_sounds(Stage().speak())))) as read:
        assert (read.getnchannels(), read.getsampwidth(), read.getframerate()) == (1, 2, RATE)
        assert len(read.readframes(RATE * 10)) == 3 * RATE


def test_wav_is_the_default_format_and_the_only_one_without_encoders() -> None:
    assert {event["media_type"] for event in Stage().speak(form="").events(SOUND)} == {"audio/wav"}
    with pytest.raises(RefusedError, match="weft runtime install speech") as refused:
        Stage().speak(form="mp3")
    assert refused.value.kind == UNSUPPORTED


def test_unknown_format_is_refused() -> None:
    with pytest.raises(RefusedError, match="response_format: must be one of: mp3, opus"):
        Stage().speak(form="midi")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        (" \n\t ", []),
        ("\x00\x07", []),
        ("Hello there.", ["Hello there."]),
        (
            "The fox jumps over the lazy dog. The answer is forty two, they say!",
            ["The fox jumps over the lazy dog.", "The answer is forty two, they say!"],
        ),
        ('He said: "It is the end of the world." Then he went home again.', None),
        ("A heading of a chapter here\n\nA paragraph that comes after it.", None),
    ],
)
def test_text_is_split_between_sentences(text: str, pieces: list[str] | None) -> None:
    found = spoken_pieces(text)
    assert found == pieces if pieces is not None else len(found) == 2


def test_short_sentences_are_grouped() -> None:
    assert spoken_pieces("Dr. Who is here. So. It is.") == ["Dr. Who is here. So. It is."]


def test_chinese_and_japanese_marks_end_a_sentence_without_a_space() -> None:
    sentence = "\u3053\u308c\u306f\u3068\u3066\u3082\u9577\u3044\u6587" * 4 + "\u3002"
    assert spoken_pieces(sentence * 2) == [sentence, sentence]


@pytest.mark.parametrize("text", ["word " * 500, "x" * 3000, "one, two and three, " * 100, ", " * 900])
def test_chunks_stay_within_the_maximum_and_lose_no_word(text: str) -> None:
    pieces = spoken_pieces(text)
    assert all(0 < len(piece) <= MAX_PIECE_CHARS for piece in pieces)
    assert "".join("".join(pieces).split()) == "".join(text.split())


def test_control_characters_and_lone_surrogates_become_spaces() -> None:
    assert spoken_pieces("one\x00two\ud800three\x1b[31m") == ["one two three [31m"]
