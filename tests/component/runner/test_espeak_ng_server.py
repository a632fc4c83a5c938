"""The espeak-ng backend with its real server process, over a program of the test and the real one."""

import asyncio
import io
import os
import shutil
import signal
import wave
from pathlib import Path
from typing import Any

import pytest
from kit.engine_settings import engine_settings
from kit.failures import fails
from kit.presence import present
from kit.speech_calls import CALL, FOX, first_piece, payload, speaking, spoken

from runner_svc.policy.timeouts import StopGraces
from runner_svc.runtimes.espeak_ng.backend import EspeakBackend
from runner_svc.runtimes.espeak_ng.runtime import EspeakModel
from weft.api.common.v1 import chat_pb2, image_pb2
from weft.kernel.errors import FieldError
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation

pytestmark = pytest.mark.slow("starts engine processes")

PROGRAM = """#!/bin/sh
# Speaks one second of silence per text; a text with "wait" lasts until its reader has gone.
case "$1" in
  --voices) printf 'Pty Language\\n 5 en-gb --/M English gmw/en\\n 5 de --/M German gmw/de\\n' ;;
  --voices=variant) printf 'Pty Language\\n 5 variant --/F female3 !v/f3\\n' ;;
  *)
    text=$(cat)
    printf 'RIFF\\377\\377\\377\\377WAVEfmt '
    printf '\\020\\0\\0\\0\\001\\0\\001\\0\\100\\037\\0\\0\\200\\076\\0\\0\\002\\0\\020\\0'
    printf 'data\\377\\377\\377\\377'
    head -c 16000 /dev/zero
    case "$text" in *wait*) exec yes ;; esac ;;
esac
"""
LONG = "This sentence is heard at once by everyone. " + "This one has to wait for a very long time. " * 5


def _backend(program: Path | None, **settings: Any) -> EspeakBackend:
    graces = StopGraces(first_term_seconds=0.3, second_term_seconds=0.3)
    flags = () if program is None else ("--program", str(program))
    return EspeakBackend(*engine_settings(EspeakModel, extra_arguments=flags, graces=graces, **settings))


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "espeak-ng"
    file.write_text(PROGRAM)
    file.chmod(0o755)
    return file


async def test_loaded_model_reports_slots_and_voices_and_supports_only_speech(program: Path) -> None:
    async with speaking(_backend(program, slots=3, default_voice="de")) as (backend, facts):
        assert facts.operations == {Operation.SPEECH}
        assert facts.slots == 3
        assert facts.abilities.voices == ("de", "en-gb")
        with fails(Reason.UNSUPPORTED_OPERATION):
            await anext(backend.generate(chat_pb2.ChatPayload(), CALL))
        with fails(Reason.UNSUPPORTED_OPERATION):
            await anext(backend.generate_images(image_pb2.ImagePayload(prompt="a"), CALL))


async def test_audio_is_sent_sentence_by_sentence_with_its_duration(program: Path) -> None:
    async with speaking(_backend(program)) as (backend, _):
        found = await spoken(backend, format="wav")
    assert found.media_type == "audio/wav"
    assert found.seconds == 2.0
    with wave.open(io.BytesIO(found.data)) as read:
        assert read.getframerate() == 8000
        assert len(read.readframes(10**6)) == 32_000


async def test_unknown_voices_and_unsupported_speeds_are_reported(program: Path) -> None:
    async with speaking(_backend(program)) as (backend, _):
        assert (await spoken(backend, voice="alloy")).warned_fields == ["voice"]
        slow = await spoken(backend, voice="en-gb+f3", speed=0.25, instructions="softly")
        assert slow.warned_fields == ["instructions", "speed"]
        with fails(field="voice"):
            await spoken(backend, voice="klingon")
        with fails(Reason.INVALID_ARGUMENT, match="input: "):
            await spoken(backend, "\x00")


async def test_unknown_default_voice_fails_the_load_and_leaves_no_process(program: Path) -> None:
    backend = _backend(program, default_voice="klingon")
    with pytest.raises(FieldError, match="default_voice"):
        await backend.start()
    assert backend.process_id is None


async def test_missing_program_fails_the_load_with_its_install_command(tmp_path: Path) -> None:
    backend = _backend(tmp_path / "none")
    with fails(Reason.CONNECT_FAILED, match="apt-get install espeak-ng"):
        await backend.start()


async def test_cancelled_request_frees_the_slot(program: Path) -> None:
    async with speaking(_backend(program, slots=1)) as (backend, _):
        for _ in range(3):
            assert await first_piece(backend, LONG)
        assert (await spoken(backend)).seconds == 2.0


async def test_killed_server_fails_its_request_and_works_after_a_restart(program: Path) -> None:
    async with speaking(_backend(program, slots=1)) as (backend, _):
        pieces = backend.speak(payload(LONG), CALL)
        assert (await anext(pieces)).data
        process = present(backend.process_id)
        os.kill(process, signal.SIGKILL)
        with fails(Reason.SERVER_DIED):
            async for _ in pieces:
                pass
        async with asyncio.timeout(30):
            await backend.wait_exit()
        await backend.stop()
        await backend.start()
        assert (await spoken(backend)).seconds == 2.0


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="apt-get install espeak-ng")
async def test_real_program_speaks_its_languages_and_slower_at_a_lower_speed() -> None:
    async with speaking(_backend(None)) as (backend, facts):
        assert {"en-gb", "de", "fr-fr"} <= set(facts.abilities.voices)
        usual, fast = await spoken(backend, format="wav"), await spoken(backend, format="wav", speed=3.0)
        assert usual.data[:4] == b"RIFF"
        assert usual.seconds > 2 * fast.seconds > 0
        named = await spoken(backend, FOX, voice="German+f3", format="wav")
        assert named.seconds > 0
