"""faster-whisper itself, under its own environment: speech of espeak-ng through a Whisper model."""

import asyncio
import os
import struct
import subprocess
import zipfile
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.engine_settings import engine_settings
from kit.failures import fails
from kit.speech import spoken
from native_builds import built_faster_whisper

from runner_svc.backend.port import BackendFacts, CallInfo, LoadOrder
from weft.api.common.v1 import audio_pb2, chat_pb2, event_pb2
from weft.dispatch.frames import Frame, collected_transcription, has_content
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.capabilities import Capabilities
from weft.kernel.requests.request_values import Operation, Skill
from weft_extensions.engines.faster_whisper.faster_whisper_backend import FasterWhisperBackend
from weft_extensions.engines.faster_whisper.runtime import FasterWhisperModel
from weft_extensions.engines.library_server import program_command

SERVER_PROGRAM = "weft_extensions.engines.faster_whisper.server"

pytestmark = [pytest.mark.runtimes, pytest.mark.timeout(3700)]

CALL = CallInfo(request_id="r1", traceparent="")
FOX = "The quick brown fox jumps over the lazy dog. The answer is forty two."
TALES = (
    "Early in the morning the baker lights his oven and kneads the dough for the first loaves.",
    "A ship from the north brings timber, salted fish and three barrels of honey into the harbour.",
    "My grandmother used to say that a good book is worth more than a silver spoon.",
    "When the bell rings at noon, the children run home across the frozen river.",
    "Nobody knew why the old clock on the tower had stopped in the middle of the summer.",
    "Two travellers asked for a room, paid in advance and left before the sun had risen.",
    "The recipe needs six eggs, a pound of butter and a little patience.",
    "Far away in the mountains, a shepherd plays the flute to his sleeping dogs.",
    "She wrote a letter to her brother, who had become a teacher in another country.",
    "In winter the trains are often late, because snow covers the rails near the bridge.",
)
"""Sentences of many words: a model takes what repeats for a loop of its own."""
ANSWER_SECONDS = 240.0
SILENCE_HOURS = 10
MOST_GROWTH_BYTES = 300_000_000
"""A piece of three minutes takes some 100 MB; ten hours at once would take 2.3 GB."""


@pytest.fixture(scope="module")
def fox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spoken(FOX, tmp_path_factory.mktemp("speech") / "fox.wav")


def _backend(**settings: Any) -> FasterWhisperBackend:
    python, model = built_faster_whisper()
    # Nothing of the repository is on the path of this interpreter, but for what the bootstrap puts there.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = program_command(SERVER_PROGRAM, str(python))
    given = {"path": model, "command": command, "environment": environment, "device": "cpu", **settings}
    return FasterWhisperBackend(*engine_settings(FasterWhisperModel, **given))


@asynccontextmanager
async def _running(**settings: Any) -> AsyncGenerator[tuple[FasterWhisperBackend, BackendFacts]]:
    backend = _backend(**settings)
    async with asyncio.timeout(120):
        facts = await backend.start()
    try:
        yield backend, facts
    finally:
        await backend.stop()


def _payload(recording: Path | bytes, **fields: Any) -> audio_pb2.TranscriptionPayload:
    data = recording if isinstance(recording, bytes) else recording.read_bytes()
    return audio_pb2.TranscriptionPayload(audio=chat_pb2.MediaPart(data=data, media_type="audio/wav"), **fields)


async def _frames(backend: FasterWhisperBackend, payload: audio_pb2.TranscriptionPayload) -> list[Frame]:
    async with asyncio.timeout(ANSWER_SECONDS):
        return [frame async for frame in backend.transcribe(payload, CALL)]


async def _words(
    backend: FasterWhisperBackend, recording: Path | bytes, **fields: Any
) -> tuple[audio_pb2.Transcription, event_pb2.InferenceEvent]:
    frames = await _frames(backend, _payload(recording, **fields))
    return collected_transcription(frames), frames[-1][-1]


def _require_fox(heard: audio_pb2.Transcription) -> None:
    assert "lazy dog" in heard.text
    assert "42" in heard.text


async def test_espeak_speech_is_transcribed_with_times_language_and_duration(fox: Path) -> None:
    async with _running() as (backend, facts):
        assert facts.operations == {Operation.TRANSCRIPTION}
        assert facts.capabilities == Capabilities(
            skills=frozenset({Skill.AUDIO}), lacking=frozenset({Skill.TEXT, Skill.IMAGE, Skill.TOOLS})
        )
        heard, end = await _words(backend, fox, with_words=True)
    _require_fox(heard)
    assert (heard.language, heard.duration_seconds > 2) == ("en", True)
    words = [word for segment in heard.segments for word in segment.words]
    assert "".join(heard.text.split()) == "".join(word.text for word in words)
    assert all(0 <= word.start_seconds <= word.end_seconds <= heard.duration_seconds + 1 for word in words)
    for segment in heard.segments:
        assert segment.HasField("mean_logprob")
        assert segment.HasField("no_speech_probability")
        assert segment.compression_ratio > 0
    receipt = end.finished.receipt
    assert abs(receipt.usage.audio_milliseconds / 1000 - heard.duration_seconds) < 0.01


async def test_prompt_temperature_voice_detection_and_translation_reach_the_model(fox: Path) -> None:
    async with _running(extra_arguments=("--voice-detection",), beam_size=2) as (backend, _):
        for fields in (
            {"prompt": "A fox and a lazy dog.", "temperature": 0.0},
            {"temperature": 0.2, "voice_detection": False, "language": "en"},
            {"translate": True},
        ):
            heard, _ = await _words(backend, fox, **fields)
            assert "dog" in heard.text, fields
        with fails(match="language: this model supports only English") as refused:
            await _words(backend, fox, language="nl")
        assert refused.value.reason is Reason.INVALID_ARGUMENT
        _require_fox((await _words(backend, fox))[0])


async def test_long_recording_is_transcribed_completely_with_each_sentence_once(tmp_path: Path) -> None:
    text = " ".join(TALES * 4)
    recording = spoken(text, tmp_path / "long.wav")
    async with _running(beam_size=1) as (backend, _):
        heard, _ = await _words(backend, recording)
    assert heard.duration_seconds > 200, "longer than one piece"
    starts = [segment.start_seconds for segment in heard.segments]
    assert starts == sorted(starts)
    assert all(
        after.start_seconds >= before.end_seconds - 1
        for before, after in zip(heard.segments, heard.segments[1:], strict=False)
    ), "nothing is heard twice"
    assert heard.segments[-1].end_seconds > heard.duration_seconds - 10


async def test_cancelled_request_frees_its_slot_for_the_next(fox: Path, tmp_path: Path) -> None:
    recording = spoken(" ".join([FOX] * 60), tmp_path / "long.wav")
    async with _running() as (backend, _):
        async with aclosing(backend.transcribe(_payload(recording), CALL)) as frames:
            while not has_content(await anext(frames)):
                pass
        process = backend.process_id
        _require_fox((await _words(backend, fox))[0])
        assert backend.process_id == process


async def test_unload_frees_the_memory(fox: Path) -> None:
    async with _running(sleeps_in_place=True, compute_type="float32") as (backend, facts):
        process = psutil.Process(backend.process_id)
        _require_fox((await _words(backend, fox))[0])
        before = process.memory_info().rss
        assert await backend.sleep()
        # 39 million parameters, four bytes each.
        assert process.memory_info().rss < before - 100_000_000
        assert await backend.start(LoadOrder()) == facts
        assert backend.process_id == process.pid
        _require_fox((await _words(backend, fox))[0])
    assert not process.is_running()


def _bad_media(fox: Path, folder: Path) -> dict[str, bytes]:
    """Files that are no recordings, or lie about what they hold."""
    zeros = folder / "zeros.zip"
    with zipfile.ZipFile(zeros, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(50_000_000))
    wild = struct.pack("<IHHIIHH", 16, 1, 60_000, 2_000_000_000, 32_000, 65_535, 16)
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile://{fox}\n#EXT-X-ENDLIST\n"
    return {
        "text": b"this is no recording\n" * 100,
        "zip": zeros.read_bytes(),
        "noise": os.urandom(100_000),
        "cut head": fox.read_bytes()[:40],
        "wild format": b"RIFF\xff\xff\xff\xffWAVEfmt " + wild + b"data\xff\xff\xff\xff" + bytes(3200),
        "playlist": playlist.encode(),
        "concatenation": f"ffconcat version 1.0\nfile '{fox}'\n".encode(),
        "no sound": b"RIFF\x24\0\0\0WAVEfmt "
        + struct.pack("<IHHIIHH", 16, 1, 1, 16_000, 32_000, 2, 16)
        + b"data\0\0\0\0",
    }


async def test_invalid_media_are_rejected_by_name_and_the_process_continues(fox: Path, tmp_path: Path) -> None:
    async with _running() as (backend, _):
        process = backend.process_id
        for what, data in _bad_media(fox, tmp_path).items():
            with pytest.raises(WeftError) as refused:
                await _words(backend, data)
            assert refused.value.reason is Reason.INVALID_ARGUMENT, what
            assert refused.value.message.startswith("file: "), what
            assert str(tmp_path) not in refused.value.message
        _require_fox((await _words(backend, fox))[0])
        assert backend.process_id == process


async def test_truncated_recording_is_transcribed_up_to_its_end(fox: Path) -> None:
    mp3 = _encoded(fox, "mp3")
    async with _running() as (backend, _):
        whole, _ = await _words(backend, mp3)
        assert "quick brown fox" in whole.text
        part, end = await _words(backend, mp3[: len(mp3) // 2])
        assert 0 < end.finished.receipt.usage.audio_milliseconds < whole.duration_seconds * 700
        assert len(part.text) < len(whole.text)


async def test_duration_limit_applies_to_the_stated_and_the_actual_length(fox: Path) -> None:
    async with _running(extra_arguments=("--max-audio-seconds", "2")) as (backend, _):
        with fails(match=r"file: lasts .* s; at most 2 s are transcribed"):
            await _words(backend, fox)
        # This format does not say how long it lasts: the sound itself is counted.
        with fails(match="file: lasts"):
            await _words(backend, _encoded(fox, "adts"))
    async with _running(extra_arguments=("--max-channels", "1", "--max-audio-bytes", str(1024 * 1024))) as (backend, _):
        _require_fox((await _words(backend, fox))[0])
        with fails(match=r"file: has .* bytes; at most 1048576 are accepted"):
            await _words(backend, bytes(2_000_000))


async def test_ten_hours_of_silence_use_bounded_memory(fox: Path) -> None:
    silence = _silence(SILENCE_HOURS)
    async with _running(extra_arguments=("--max-audio-seconds", str(SILENCE_HOURS * 3600 + 60))) as (backend, _):
        _require_fox((await _words(backend, fox))[0])
        process = psutil.Process(backend.process_id)
        before, most = process.memory_info().rss, 0
        async with asyncio.timeout(ANSWER_SECONDS):
            async for frame in backend.transcribe(_payload(silence), CALL):
                most = max(most, process.memory_info().rss)
                last = frame
        heard = last[-1].finished.receipt.usage.audio_milliseconds
        assert heard == SILENCE_HOURS * 3600 * 1000
        assert most - before < MOST_GROWTH_BYTES
        _require_fox((await _words(backend, fox))[0])


_ENCODE = """
import sys, av, numpy
source, target, form, hours = sys.argv[1:]
codec = {"adts": "aac"}.get(form, form)
with av.open(target, "w", format=form) as out:
    rate = 16_000
    stream = out.add_stream(codec, rate=rate)
    stream.layout = "mono"
    resampler = av.AudioResampler(format=stream.format.name if stream.format else "s16", layout="mono", rate=rate)
    def frames():
        if hours == "0":
            with av.open(source) as file:
                for frame in file.decode(audio=0):
                    frame.pts = None
                    yield from resampler.resample(frame)
                yield from resampler.resample(None)
            return
        zeros = numpy.zeros((1, rate * 10), dtype=numpy.int16)
        for number in range(int(hours) * 360):
            frame = av.AudioFrame.from_ndarray(zeros, format="s16", layout="mono")
            frame.sample_rate, frame.pts = rate, number * rate * 10
            yield frame
    for frame in frames():
        out.mux(stream.encode(frame))
    out.mux(stream.encode(None))
"""
"""Encodes with the libraries of the engine's environment: there is no ffmpeg program."""


def _encode(source: Path, target: Path, form: str, hours: int) -> bytes:
    python, _ = built_faster_whisper()
    words = [str(python), "-c", _ENCODE, str(source), str(target), form, str(hours)]
    subprocess.run(words, check=True, timeout=ANSWER_SECONDS, capture_output=True)
    return target.read_bytes()


def _encoded(source: Path, form: str) -> bytes:
    return _encode(source, source.with_suffix(f".{form}"), form, 0)


def _silence(hours: int) -> bytes:
    python, _ = built_faster_whisper()
    return _encode(python, python.parents[3] / f"silence-{hours}h.flac", "flac", hours)
