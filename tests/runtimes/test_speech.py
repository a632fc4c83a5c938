"""piper itself, under the environment of speech."""

import asyncio
import json
import os
import subprocess
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from kit.engine_settings import engine_settings
from kit.failures import fails
from kit.speech_calls import CALL, FOX, Spoken, speaking, spoken
from native_builds import SPEECH, built_speech

from runner_svc.environments.folder import EnvironmentFolder
from runner_svc.openai_upstream.client import SPEECH as SPEECH_PATH
from runner_svc.openai_upstream.sse import MAX_EVENT_BYTES
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.errors.reasons import Reason
from weft_extensions.engines.piper.piper_backend import PiperBackend
from weft_extensions.engines.piper.runtime import PiperModel

pytestmark = [pytest.mark.runtimes, pytest.mark.timeout(3700)]

VOICE = "en_US-joe-medium"
RATES = {"mp3": 22050, "opus": 48000, "aac": 22050, "flac": 22050, "wav": 22050}
CODECS = {"mp3": "mp3float", "opus": "opus", "aac": "aac", "flac": "flac", "wav": "pcm_s16le"}
PADDING_SECONDS = 0.15
"""Silence that mp3 and AAC add at both ends: two frames and the delay of the encoder."""
LONG = " ".join(f"This is the sentence with the number {number} of many." for number in range(60))
DECODE = """
import io, sys, av
with av.open(io.BytesIO(sys.stdin.buffer.read())) as recording:
    sound = recording.streams.audio[0]
    samples = sum(frame.samples for frame in recording.decode(audio=0))
    print(sound.codec_context.name, sound.rate, sound.channels, samples)
"""


def _context(**settings: Any) -> dict[str, Any]:
    built_speech()
    # Nothing of the repository is on the path of this interpreter, but for what the bootstrap puts there.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {"environment": environment, "environments": EnvironmentFolder(SPEECH / "runtimes"), **settings}


def _piper(**settings: Any) -> PiperBackend:
    given = {"path": built_speech()[1], **settings} if "voices" not in settings else settings
    return PiperBackend(*engine_settings(PiperModel, **_context(**given)))


def _decoded(found: Spoken) -> tuple[str, int, int, int]:
    """The codec, the rate, the channels and the samples of a recording, as the library of the environment reads it."""
    answer = subprocess.run(
        [str(built_speech()[0]), "-c", DECODE], input=found.data, capture_output=True, check=True, timeout=60
    )
    codec, rate, channels, samples = answer.stdout.decode().split()
    return codec, int(rate), int(channels), int(samples)


@pytest.mark.parametrize("form", sorted(RATES))
async def test_recording_matches_its_format_and_the_duration_on_its_receipt(form: str) -> None:
    async with speaking(_piper()) as (backend, _):
        found = await spoken(backend, format=form)
    codec, rate, channels, samples = _decoded(found)
    assert (codec, rate, channels) == (CODECS[form], RATES[form], 1)
    assert found.seconds > 1
    assert samples / rate == pytest.approx(found.seconds, abs=PADDING_SECONDS if form in ("mp3", "aac") else 0.002)


async def test_pcm_has_24000_samples_per_second_and_no_header() -> None:
    async with speaking(_piper()) as (backend, _):
        found = await spoken(backend, format="pcm")
    assert found.media_type == "audio/pcm"
    assert len(found.data) / 2 / 24_000 == pytest.approx(found.seconds, abs=0.002)


async def test_default_format_is_mp3() -> None:
    async with speaking(_piper()) as (backend, _):
        found = await spoken(backend, "One short sentence.")
    assert found.media_type == "audio/mpeg"
    assert _decoded(found)[0] == CODECS["mp3"]


async def test_higher_speed_shortens_the_recording() -> None:
    async with speaking(_piper()) as (backend, _):
        slow, usual, fast = [await spoken(backend, format="wav", speed=speed) for speed in (0.5, 1.0, 3.0)]
    assert slow.seconds > 1.3 * usual.seconds > 2 * fast.seconds > 0


async def test_first_chunk_is_sent_before_the_last_sentence_is_spoken() -> None:
    async with speaking(_piper()) as (backend, _):
        body = {"input": LONG, "voice": backend.capabilities.voices[0], "response_format": "mp3"}
        before: list[dict[str, Any]] = []
        async with (
            asyncio.timeout(60),
            aclosing(backend._running().post_for_events(SPEECH_PATH, body, CALL, MAX_EVENT_BYTES)) as events,
        ):
            async for _, data in events:
                before.append(json.loads(data))
                if "audio" in before[-1]:
                    break
    done = [event["work_progress"] for event in before if "work_progress" in event]
    assert all(each["done"] < each["total"] for each in done)


async def test_piper_voice_is_found_by_file_alias_and_name() -> None:
    model = built_speech()[1] / f"{VOICE}.onnx"
    backend = _piper(voices={"joe": model}, voice_aliases={"nova": "joe"})
    async with speaking(backend) as (speaker, facts):
        assert facts.capabilities.voices == ("joe", "nova")
        for voice, warned in (("joe", []), ("nova", []), ("", []), ("alloy", ["voice"])):
            assert (await spoken(speaker, "Hello there.", voice=voice)).warned_fields == warned
        with pytest.raises(FieldError, match="it has joe"):
            await spoken(speaker, FOX, voice=VOICE)


async def test_broken_piper_voice_is_rejected_and_the_others_continue(tmp_path: Path) -> None:
    good = built_speech()[1] / f"{VOICE}.onnx"
    configuration = good.with_name(f"{good.name}.json").read_text()
    for name, content in (("cut", good.read_bytes()[:100_000]), ("text", b"no model at all"), ("pickle", b"\x80\x04.")):
        (tmp_path / f"{name}.onnx").write_bytes(content)
        (tmp_path / f"{name}.onnx.json").write_text(configuration)
    (tmp_path / "json.onnx").symlink_to(good)
    (tmp_path / "json.onnx.json").write_text("{}")
    async with speaking(_piper(path=tmp_path, voices={"joe": good}, default_voice="joe")) as (backend, facts):
        assert "json" not in facts.capabilities.voices
        for name in ("cut", "text", "pickle", "json"):
            with fails(match=name) as refused:
                await spoken(backend, FOX, voice=name)
            assert refused.value.reason is Reason.INVALID_ARGUMENT
        assert (await spoken(backend, "And now this.")).seconds > 0
    with fails(match="cut cannot be loaded"):
        await _piper(path=tmp_path, default_voice="cut").start()
