"""Server programs that weft starts by their command line: presets over fakes of their dialects, and failed starts."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from kit.engines import CALL, chat, control_of, events_of, started
from kit.failures import fails
from server_dialects import DIALECTS, TOLD, fake_command, preset_settings, server_settings

from runner_svc.backend.port import CacheIsolation, CacheUse
from runner_svc.runtimes.model_engine import ModelContext
from runner_svc.runtimes.server.presets import PRESETS, PresetName
from runner_svc.runtimes.server.runtime import ReadySettings, ServerModel, command_of
from runner_svc.runtimes.server.server_backend import ServerBackend
from weft.api.common.v1 import audio_pb2, chat_pb2, image_pb2, sampling_pb2, tokenize_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_backend.dialect import Dialect

pytestmark = pytest.mark.slow("starts engine processes")

Item = TypeVar("Item")


@asynccontextmanager
async def _running(settings: tuple[ServerModel, ModelContext]) -> AsyncGenerator[ServerBackend]:
    async with started(ServerBackend(*settings)) as (backend, _):
        yield backend


async def _start_failure(settings: tuple[ServerModel, ModelContext]) -> WeftError:
    backend = ServerBackend(*settings)
    with pytest.raises(WeftError) as failed:
        async with asyncio.timeout(30.0):
            await backend.start()
    assert backend.process_id is None, "a failed start leaves no process"
    return failed.value


async def _all(items: AsyncGenerator[Item]) -> list[Item]:
    return [item async for item in items]


@pytest.mark.parametrize("name", PRESETS)
async def test_model_of_each_preset_thinks_answers_and_counts(name: PresetName) -> None:
    switches = {"reasoning_text": "well then", "answer_tokens": 5}
    async with _running(preset_settings(name, switches)) as backend, control_of(backend) as control:
        events = await events_of(backend, chat())
        body = (await control.state()).last_request_body
    assert "".join(event.delta.reasoning for event in events).split() == ["well", "then"]
    assert "".join(event.delta.text for event in events).split() == [f"tok{n}" for n in range(5)]
    assert events[-1].finished.receipt.usage.prompt_tokens > 0
    assert body["model"] == (PRESETS[name].upstream_model or "fake")
    assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("name", PRESETS)
async def test_program_is_sent_only_the_parameters_of_its_preset(name: PresetName) -> None:
    parameters = PRESETS[name].parameters
    sampling = sampling_pb2.SamplingParams(top_k=7, repeat_penalty=1.25, min_p=0.5, temperature=0.5)
    async with _running(preset_settings(name)) as backend, control_of(backend) as control:
        events = await events_of(backend, chat(sampling=sampling))
        body = (await control.state()).last_request_body
    warned = {event.warning.field for event in events if event.HasField("warning")}
    assert warned == parameters.untaken & {"top_k", "repeat_penalty", "min_p"}
    assert not parameters.untaken & body.keys()
    assert body["temperature"] == 0.5
    if parameters.renamed:
        assert body["repetition_penalty"] == 1.25
        assert "repeat_penalty" not in body


async def test_sglang_counts_tokens_salts_prefixes_and_flushes_its_cache() -> None:
    async with _running(preset_settings("sglang")) as backend, control_of(backend) as control:
        assert backend.operations == PRESETS["sglang"].operations
        counted = await backend.tokenize(tokenize_pb2.TokenizePayload(chat=chat()), CALL)
        events = await events_of(backend, chat(), replace(CALL, cache=CacheUse(salt="of-a-tenant")))
        await backend.erase_cache()
        state = await control.state()
    assert counted.count == events[-1].finished.receipt.usage.prompt_tokens
    assert backend.cache_isolation is CacheIsolation.SALT
    assert state.last_request_body["cache_salt"] == "of-a-tenant"
    assert state.route_calls == ["POST /flush_cache {}"]


async def test_program_without_cache_flush_reports_it() -> None:
    async with _running(preset_settings("tgi")) as backend:
        assert backend.cache_isolation is CacheIsolation.NONE
        with fails(Reason.UNSUPPORTED_OPERATION):
            await backend.erase_cache()


async def test_media_program_is_started_and_called_by_openai_routes() -> None:
    command = fake_command(*TOLD, "--offers", "image,transcription,speech")
    media = ("image", "transcription", "speech")
    image = image_pb2.ImagePayload(prompt="a cat", count=2, steps=5)
    sound = audio_pb2.TranscriptionPayload(audio=chat_pb2.MediaPart(data=b"012", media_type="audio/wav"))
    async with _running(server_settings(command=command, operations=media)) as backend:
        made = [event for frame in await _all(backend.generate_images(image, CALL)) for event in frame]
        heard = [event for frame in await _all(backend.transcribe(sound, CALL)) for event in frame]
        spoken = await _all(backend.speak(audio_pb2.SpeechPayload(input="a b", voice="c"), CALL))
    assert [event.WhichOneof("event") for event in made] == ["image", "image", "finished"]
    usage = made[-1].finished.receipt.usage
    assert (usage.image_steps, usage.image_pixels) == (10, 2), "the fake's images have one pixel"
    assert "".join(event.transcript.text for event in heard[:-1]) == "3 bytes of sound"
    assert b"".join(part.data for part in spoken).startswith(b"RIFF")


async def test_text_program_rejects_image_generation() -> None:
    async with _running(server_settings(command=fake_command(*TOLD))) as backend:
        with fails(Reason.UNSUPPORTED_OPERATION):
            await _all(backend.generate_images(image_pb2.ImagePayload(prompt="a cat"), CALL))


@pytest.mark.usefixtures("cold_engines")
async def test_ollama_gets_its_address_from_the_environment_and_preloads_the_model() -> None:
    async with (
        _running(preset_settings("ollama", upstream_model="llama3.2", slots=2)) as backend,
        control_of(backend) as control,
    ):
        environment = psutil.Process(backend.process_id).environ()
        state = await control.state()
    assert control.base_url.removeprefix("http://") == environment["OLLAMA_HOST"]
    assert environment["OLLAMA_NUM_PARALLEL"] == "2"
    assert environment["OLLAMA_KEEP_ALIVE"] == "-1"
    assert state.route_calls == ['POST /api/generate {"model": "llama3.2", "stream": false}']


async def test_unknown_model_of_a_program_is_rejected_with_the_available_names() -> None:
    command = fake_command("--listen-variable", "OLLAMA_HOST", "--alias", "llama3.2:latest", dialect=DIALECTS["ollama"])
    error = await _start_failure(server_settings(preset="ollama", command=command, upstream_model="lama3"))
    assert error.reason is Reason.MODEL_NOT_FOUND
    assert "llama3.2:latest" in error.message
    assert "qwen3:8b" in error.message


@pytest.mark.usefixtures("cold_engines")
async def test_program_requires_a_key_that_differs_per_start() -> None:
    keys = []
    backend = ServerBackend(*preset_settings("tgi"))
    for _ in range(2):
        await backend.start()
        process = psutil.Process(backend.process_id)
        keys.append(process.environ()["API_KEY"])
        assert keys[-1] not in " ".join(process.cmdline())
        assert await events_of(backend, chat())
        await backend.stop()
    assert len(set(keys)) == 2


async def test_program_is_ready_by_an_output_line() -> None:
    script = "import time; print('warming', flush=True); time.sleep(0.5); print('is warm', flush=True); time.sleep(60)"
    # It never listens: what shows that it is ready is the line alone, and the port is not its own.
    error = await _start_failure(
        server_settings(command=(sys.executable, "-c", script, "{port}"), ready=ReadySettings(line="is warm$"))
    )
    assert error.reason is Reason.CONNECT_FAILED
    assert "does not listen on its port" in error.message
    command = fake_command(*TOLD, dialect=Dialect(lacks=("/health",)))
    async with _running(server_settings(command=command, ready=ReadySettings(line=r"listening on http"))) as backend:
        assert await events_of(backend, chat())


async def test_program_is_ready_by_a_route_status() -> None:
    command = fake_command(*TOLD, dialect=Dialect(lacks=("/health", "/up")))
    async with _running(server_settings(command=command, ready=ReadySettings(path="/up", status=404))) as backend:
        assert await events_of(backend, chat())
        assert await backend.responds(5.0)


async def test_slow_start_times_out_even_if_the_program_is_busy() -> None:
    script = "import sys\nwhile True: pass"
    command = (sys.executable, "-c", script, "{port}")
    error = await _start_failure(server_settings(command=command, start_timeout_seconds=1.0))
    assert error.reason is Reason.LOAD_STALLED
    assert "start_timeout_seconds" in error.message


async def test_missing_program_error_suggests_how_to_install_it() -> None:
    error = await _start_failure(
        server_settings(preset="tgi", model="m", environment={**os.environ, "PATH": "/nowhere"})
    )
    assert error.reason is Reason.CONNECT_FAILED
    assert "text-generation-launcher" in error.message
    assert PRESETS["tgi"].install in error.message


async def test_program_starts_in_its_working_folder(tmp_path: Path) -> None:
    async with _running(server_settings(command=fake_command(*TOLD), working_folder=tmp_path)) as backend:
        assert psutil.Process(backend.process_id).cwd() == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "sleep", "wake"),
    [
        ("sglang", "/release_memory_occupation {}", "/resume_memory_occupation {}"),
        ("lmdeploy", "/sleep?level=1 {}", "/wakeup {}"),
        (
            "ollama",
            '/api/generate {"model": "llama3.2", "stream": false, "keep_alive": 0}',
            '/api/generate {"model": "llama3.2", "stream": false}',
        ),
    ],
)
async def test_program_with_sleep_routes_sleeps_and_wakes_in_its_process(
    name: PresetName, sleep: str, wake: str
) -> None:
    settings = preset_settings(name, upstream_model="llama3.2" if name == "ollama" else None, sleeps_in_place=True)
    async with _running(settings) as backend, control_of(backend) as control:
        process = backend.process_id
        assert await backend.sleep()
        facts = await backend.start()
        assert backend.process_id == process
        assert facts.slots == settings[0].slots
        assert (await events_of(backend, chat()))[-1].HasField("finished")
        assert (await control.state()).route_calls[-2:] == [f"POST {sleep}", f"POST {wake}"]


async def test_program_does_not_sleep_in_place_unless_configured() -> None:
    async with _running(preset_settings("sglang")) as backend, control_of(backend) as control:
        assert not await backend.sleep()
        assert (await control.state()).route_calls == []


async def test_program_that_refuses_to_sleep_must_be_stopped() -> None:
    dialect = Dialect(owned_by="sglang", metrics=DIALECTS["sglang"].metrics)
    async with _running(preset_settings("sglang", sleeps_in_place=True, dialect=dialect)) as backend:
        assert not await backend.sleep()


async def test_program_that_does_not_wake_is_restarted() -> None:
    dialect = Dialect(owned_by="sglang", metrics=DIALECTS["sglang"].metrics, answers=("/release_memory_occupation",))
    async with _running(preset_settings("sglang", sleeps_in_place=True, dialect=dialect)) as backend:
        process = backend.process_id
        assert await backend.sleep()
        await backend.start()
        assert backend.process_id not in (None, process)
        assert (await events_of(backend, chat()))[-1].HasField("finished")


def test_sglang_preset_adds_the_argument_required_for_sleep() -> None:
    model, context = server_settings(preset="sglang", model="m", sleeps_in_place=True)
    assert command_of(model, context.command)[-1] == "--enable-memory-saver"
    own, context = server_settings(preset="sglang", command=("serve", "{port}"), sleeps_in_place=True)
    assert command_of(own, context.command) == ("serve", "{port}"), "a command of one's own is left alone"
