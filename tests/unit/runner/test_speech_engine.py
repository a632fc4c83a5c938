"""The work on a request for speech, over a speaker of the test."""

import io
import wave
from collections.abc import Callable, Iterator, Sequence

import pytest

from runner_svc.engine_host.engine import CancelledRequestError, Job, RefusedError
from runner_svc.engine_host.messages import Done, Sleep, Sound, Speak, ToRunner, Voice, Worked
from runner_svc.engine_host.sound_encoder import make_encoder
from runner_svc.engine_host.speech import MAX_SOUND_BYTES, SpeechEngine

RATE = 8000
TEXT = "This is the first of the sentences. This is the second of the sentences. And the last of the sentences."


class RecordedSpeaker:
    """Half a second of silence per piece of a text; it notes what was said when."""

    voices: Sequence[Voice] = (Voice(name="one"),)
    variants: Sequence[str] = ()

    def __init__(self, note: Callable[[str], None], sample_bytes: int = RATE) -> None:
        self._note = note
        self._sample_bytes = sample_bytes

    def sample_rate(self, voice: str) -> int:
        del voice
        return RATE

    def samples(self, text: str, request: Speak, job: Job) -> Iterator[bytes]:
        del request, job
        self._note(text)
        if self._sample_bytes:
            yield bytes(self._sample_bytes)


class Stage:
    """An engine with its job, and everything that happened, in order."""

    def __init__(self, sample_bytes: int = RATE) -> None:
        self.happened: list[str | ToRunner] = []
        self.engine = SpeechEngine(RecordedSpeaker(self.happened.append, sample_bytes), None, 1)
        self.job = Job(7, self.happened.append)

    def speak(self, text: str = TEXT, form: str = "wav") -> list[str | ToRunner]:
        self.engine.work(Speak(id=7, text=text, voice="one", format=form), self.job)
        return self.happened


def test_the_first_piece_leaves_before_the_next_sentence_is_spoken() -> None:
    happened = Stage().speak()
    kinds = [each if isinstance(each, str) else type(each) for each in happened]
    first, second, third = TEXT.replace("s. ", "s.|").split("|")
    assert kinds == [first, Sound, Worked, second, Sound, Worked, third, Sound, Worked, Done]


def test_progress_is_counted_in_characters_and_the_end_tells_the_length() -> None:
    happened = Stage().speak()
    worked = [each for each in happened if isinstance(each, Worked)]
    assert [each.done for each in worked] == sorted(each.done for each in worked)
    assert {each.total for each in worked} == {worked[-1].done}
    done = happened[-1]
    assert isinstance(done, Done)
    assert done.audio_seconds == 1.5


def test_a_cancelled_request_ends_between_two_sentences() -> None:
    stage = Stage()
    stage.job.send = lambda answer: stage.job.cancel() if isinstance(answer, Sound) else None
    with pytest.raises(CancelledRequestError):
        stage.speak()
    assert stage.happened == [TEXT.split(". ", maxsplit=1)[0] + "."]


@pytest.mark.parametrize(("text", "sample_bytes"), [("\x00\x01", RATE), ("...", 0)])
def test_a_text_without_anything_to_speak_is_refused_before_the_first_byte(text: str, sample_bytes: int) -> None:
    stage = Stage(sample_bytes)
    with pytest.raises(RefusedError, match="input: ") as refused:
        stage.speak(text)
    assert refused.value.reason == "INVALID_ARGUMENT"
    assert not any(isinstance(each, Sound) for each in stage.happened)


def test_a_long_recording_travels_in_pieces() -> None:
    happened = Stage(3 * MAX_SOUND_BYTES).speak("One sentence of the usual length.")
    pieces = [each.data for each in happened if isinstance(each, Sound)]
    assert [len(piece) for piece in pieces] == [MAX_SOUND_BYTES, MAX_SOUND_BYTES, MAX_SOUND_BYTES, 44]


def test_a_wav_is_read_by_other_programs() -> None:
    pieces = [each.data for each in Stage().speak() if isinstance(each, Sound)]
    with wave.open(io.BytesIO(b"".join(pieces))) as read:
        assert (read.getnchannels(), read.getsampwidth(), read.getframerate()) == (1, 2, RATE)
        assert len(read.readframes(RATE * 10)) == 3 * RATE


def test_without_encoders_there_is_wav_also_for_a_request_that_names_no_format() -> None:
    sounds = [each for each in Stage().speak(form="") if isinstance(each, Sound)]
    assert {sound.media_type for sound in sounds} == {"audio/wav"}
    with pytest.raises(RefusedError, match="weft runtime install speech") as refused:
        Stage().speak(form="mp3")
    assert refused.value.reason == "UNSUPPORTED_OPERATION"


def test_a_format_that_does_not_exist_is_refused() -> None:
    with pytest.raises(RefusedError, match="response_format: must be one of: mp3, opus"):
        make_encoder(None, "midi", RATE)


def test_other_work_is_refused() -> None:
    stage = Stage()
    with pytest.raises(RefusedError) as refused:
        stage.engine.work(Sleep(id=7), stage.job)
    assert refused.value.reason == "UNSUPPORTED_OPERATION"
