"""The faster-whisper backend with its real server process, over stand-ins for its libraries."""

import asyncio
import json
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path
from typing import Any

import pytest
from hosted_stage import scripted
from kit.engine_settings import engine_settings
from kit.engines import ANSWER_SECONDS, CALL, START_SECONDS, started, told_lines
from kit.failures import fails
from kit.presence import present

from runner_svc.backend.port import BackendFacts, LoadOrder
from runner_svc.policy.load_options import AS_CONFIGURED
from weft.api.common.v1 import audio_pb2, chat_pb2, completion_pb2
from weft.dispatch.frames import Frame, collected_transcription, has_content
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation, Skill
from weft_extensions.engines.faster_whisper.faster_whisper_backend import FasterWhisperBackend
from weft_extensions.engines.faster_whisper.runtime import RUNTIME, FasterWhisperModel
from weft_extensions.engines.library_server import program_command

SERVER_PROGRAM = "weft_extensions.engines.faster_whisper.server"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("model.bin", "tokenizer.json", "config.json"):
        (folder / name).write_text("{}")
    return folder


def _backend(model: Path, switches: dict[str, Any] | None = None, **settings: Any) -> FasterWhisperBackend:
    given = {"path": model, "command": program_command(SERVER_PROGRAM), "device": "cpu", **settings}
    given = scripted("SCRIPTED_FASTER_WHISPER", switches, **given)
    return FasterWhisperBackend(*engine_settings(FasterWhisperModel, **given))


def _running(
    model: Path, switches: dict[str, Any] | None = None, **settings: Any
) -> AbstractAsyncContextManager[tuple[FasterWhisperBackend, BackendFacts]]:
    return started(_backend(model, switches, **settings))


def _payload(fields: dict[str, Any] | None = None, **recording: Any) -> audio_pb2.TranscriptionPayload:
    data = json.dumps({"seconds": 4, "rate": 16_000, "channels": 1, **recording}).encode()
    return audio_pb2.TranscriptionPayload(audio=chat_pb2.MediaPart(data=data, media_type="audio/wav"), **(fields or {}))


async def _frames(backend: FasterWhisperBackend, payload: audio_pb2.TranscriptionPayload) -> list[Frame]:
    async with asyncio.timeout(ANSWER_SECONDS):
        return [frame async for frame in backend.transcribe(payload, CALL)]


async def _heard(
    backend: FasterWhisperBackend, payload: audio_pb2.TranscriptionPayload
) -> tuple[audio_pb2.Transcription, Frame]:
    frames = await _frames(backend, payload)
    return collected_transcription(frames), [event for frame in frames for event in frame]


async def _calls(backend: FasterWhisperBackend, count: int) -> list[tuple[float, dict[str, Any]]]:
    """What the library was given, seconds and options of each call, once there are so many."""
    lines = await told_lines(backend, "heard ", count)
    return [(float(line.split()[1]), json.loads(line.partition(" with ")[2])) for line in lines]


@pytest.mark.slow("starts engine processes")
async def test_backend_supports_only_transcription(model: Path) -> None:
    async with _running(model) as (backend, facts):
        assert facts.operations == {Operation.TRANSCRIPTION}
        assert facts.capabilities is not None
        assert facts.capabilities.skills == {Skill.AUDIO}
        with fails(Reason.UNSUPPORTED_OPERATION):
            backend.generate(completion_pb2.CompletionPayload(), CALL)
    engine = RUNTIME.build(*engine_settings(FasterWhisperModel, path=model))
    assert engine.operations == {Operation.TRANSCRIPTION}
    assert engine.capabilities == facts.capabilities, "the mesh knows it before the model is loaded"


@pytest.mark.slow("starts engine processes")
async def test_settings_and_load_order_reach_the_library(model: Path) -> None:
    async with _running(model, device="cuda", compute_type="float16", slots=3, threads=2) as (backend, facts):
        assert "loaded on cuda as float16, 2 threads, 3 at once" in backend.log_lines(10)
        assert facts.slots == 3
    backend = _backend(model, device="cuda")
    await backend.start(LoadOrder(shares=()))
    try:
        assert "loaded on cpu as int8, 1 threads, 1 at once" in backend.log_lines(10), "no device may be used"
    finally:
        await backend.stop()


@pytest.mark.slow("starts engine processes")
async def test_transcription_has_segments_with_statistics_and_requested_words(model: Path) -> None:
    async with _running(model) as (backend, _):
        plain, events = await _heard(backend, _payload())
        with_words, _ = await _heard(backend, _payload({"with_words": True}))
    (segment,) = plain.segments
    assert (plain.text, plain.language, plain.duration_seconds) == ("0", "en", 4.0)
    assert (segment.start_seconds, segment.end_seconds, segment.text) == (0.0, 4.0, " 0")
    assert (segment.mean_logprob, segment.no_speech_probability, segment.compression_ratio) == (-0.5, 0.25, 1.5)
    assert not segment.words
    assert [word.text for word in with_words.segments[0].words] == ["0"]
    receipt = events[-1].finished.receipt
    assert (receipt.usage.audio_milliseconds, receipt.usage.completion_tokens) == (4000, 1)


@pytest.mark.slow("starts engine processes")
async def test_long_recording_is_split_into_gapless_pieces_with_previous_text_as_context(model: Path) -> None:
    async with _running(model) as (backend, _):
        heard, events = await _heard(backend, _payload({"prompt": "ab"}, seconds=400))
        calls = await _calls(backend, 3)
    starts = [segment.start_seconds for segment in heard.segments]
    assert starts == [29.0 * number for number in range(14)]
    assert heard.segments[-1].end_seconds == 400.0
    # The window at 174 s would be 6 s long: the next piece begins there.
    assert [seconds for seconds, _ in calls] == [180.0, 186.0, 52.0]
    prompt = [ord(letter) for letter in " ab"]
    assert calls[0][1]["initial_prompt"] == prompt
    assert calls[1][1]["initial_prompt"] == [*prompt, 0, 1, 2, 3, 4, 5]
    assert [options["language"] for _, options in calls] == [None, "en", "en"], "it is detected once"
    done = [event.work_progress.done for event in events if event.HasField("work_progress")]
    assert done == sorted(done)
    assert done[-1] == 400.0


@pytest.mark.slow("starts engine processes")
async def test_high_temperature_text_is_not_used_as_context(model: Path) -> None:
    async with _running(model, {"temperature": 0.8}) as (backend, _):
        await _frames(backend, _payload({"prompt": "ab"}, seconds=200))
        assert (await _calls(backend, 2))[1][1]["initial_prompt"] is None


async def test_silent_piece_is_not_sent_to_the_model(model: Path) -> None:
    async with _running(model) as (backend, _):
        heard, events = await _heard(backend, _payload(seconds=14_000, peak=0.0, stated=0))
        assert await _calls(backend, 0) == []
    assert (heard.text, list(heard.segments)) == ("", [])
    assert events[-1].finished.receipt.usage.audio_milliseconds == 14_000_000


@pytest.mark.slow("starts engine processes")
async def test_voice_detection_transcribes_only_speech(model: Path) -> None:
    detecting = ("--voice-detection",)
    async with _running(model, {"voices": [[10, 20], [40, 50]]}, extra_arguments=detecting) as (
        backend,
        _,
    ):
        heard, _ = await _heard(backend, _payload(seconds=100))
        assert [(seconds, options["vad_filter"]) for seconds, options in await _calls(backend, 1)] == [(40.0, True)]
        assert heard.segments[0].start_seconds == 10.0
        await _heard(backend, _payload({"voice_detection": False}, seconds=100))
        seconds, options = (await _calls(backend, 2))[-1]
        assert (seconds, options["vad_filter"]) == (100.0, False)
    async with _running(model, {"voices": []}) as (backend, _):
        heard, _ = await _heard(backend, _payload({"voice_detection": True}, seconds=400))
        assert (heard.text, await _calls(backend, 0)) == ("", [])


@pytest.mark.slow("starts engine processes")
async def test_request_parameters_reach_the_library(model: Path) -> None:
    async with _running(model, beam_size=3) as (backend, _):
        await _frames(backend, _payload({"language": "NL", "translate": True, "temperature": 0.5}))
        await _frames(backend, _payload({"temperature": 0.0}))
        (_, given), (_, plain) = await _calls(backend, 2)
    assert (given["language"], given["task"], given["beam_size"]) == ("nl", "translate", 3)
    assert given["temperature"] == [0.5, 0.7, 0.9]
    assert (plain["task"], "temperature" in plain) == ("transcribe", False), "0 is where the library begins"


@pytest.mark.slow("starts engine processes")
async def test_unsupported_language_is_rejected_by_name(model: Path) -> None:
    for languages, words in ((["en"], "supports only English, not 'nl'"), (["en", "de"], "supports 2 languages")):
        async with _running(model, {"languages": languages}) as (backend, _):
            with fails(match=words) as refused:
                await _frames(backend, _payload({"language": "nl"}))
            assert refused.value.message.startswith("language: ")


@pytest.mark.slow("starts engine processes")
@pytest.mark.parametrize(
    ("recording", "words"),
    [
        ({"seconds": 20}, "lasts 20 s; at most 10 s are transcribed"),
        ({"seconds": 20, "stated": 0}, "is longer than the limit of 10 s"),
        ({"seconds": 20, "stated": 3}, "is longer than the limit of 10 s"),
        ({"channels": 3}, "has 3 channels; 1 to 2 are supported"),
        ({"seconds": 10, "late_channels": 3}, "has 3 channels; 1 to 2 are supported"),
        ({"channels": 0}, "has no sound"),
        ({"rate": 1_000}, "has 1000 samples per second; 4000 to 48000 are supported"),
        ({"rate": 96_000}, "has 96000 samples per second"),
        ({"seconds": 0}, "contains no audio that can be decoded"),
        ({"bad": 65}, "cannot be decoded: Invalid data found"),
        ({"comment": "x" * 2_000_000}, "bytes; at most 1048576 are accepted"),
    ],
)
async def test_oversized_recording_is_rejected_and_the_process_continues(
    model: Path, recording: dict[str, Any], words: str
) -> None:
    limits = (
        "--max-audio-seconds",
        "10",
        "--max-channels",
        "2",
        "--max-sample-rate-hz",
        "48000",
        "--max-audio-bytes",
        str(1024 * 1024),
    )
    async with _running(model, None, extra_arguments=limits) as (backend, _):
        process = backend.process_id
        with fails(Reason.INVALID_ARGUMENT, match=words) as refused:
            await _frames(backend, _payload(**recording))
        assert refused.value.message.startswith("file: ")
        assert (await _heard(backend, _payload(bad=3)))[0].text == "0", "a few broken packets are left out"
        assert backend.process_id == process


async def test_invalid_recording_is_rejected_without_exposing_the_runner_path(model: Path) -> None:
    async with _running(model) as (backend, _):
        payload = audio_pb2.TranscriptionPayload(audio=chat_pb2.MediaPart(data=b"text", media_type="audio/wav"))
        with pytest.raises(WeftError) as refused:
            await _frames(backend, payload)
    assert refused.value.message.startswith("file: is not a readable recording: Invalid data")
    assert "/" not in refused.value.message


@pytest.mark.slow("starts engine processes")
async def test_cancelled_request_stops_at_the_next_window(model: Path) -> None:
    async with _running(model, {"seconds_per_window": 0.05}) as (backend, _):
        async with aclosing(backend.transcribe(_payload(seconds=14_000), CALL)) as frames:
            while not has_content(await anext(frames)):
                pass
        assert (await _heard(backend, _payload()))[0].text == "0"
        assert len(await _calls(backend, 2)) < 6, "most of the recording was not heard"


@pytest.mark.slow("starts engine processes")
async def test_cancelled_request_stops_at_the_next_decoding_attempt(model: Path) -> None:
    async with _running(model, {"seconds_per_window": 0.02, "attempts": 100_000}) as (backend, _):
        async with aclosing(backend.transcribe(_payload(), CALL)) as frames:
            for _ in range(3):
                assert not has_content(await anext(frames)), "each attempt shows that the engine works"
        assert await backend.responds(START_SECONDS)
        async with aclosing(backend.transcribe(_payload(), CALL)) as frames:
            await anext(frames)


@pytest.mark.slow("starts engine processes")
async def test_requests_run_in_parallel_in_a_model_with_several_slots(model: Path) -> None:
    async with (
        _running(model, {"seconds_per_window": 0.05}, slots=2) as (backend, _),
        aclosing(backend.transcribe(_payload(seconds=14_000), CALL)) as long,
    ):
        while not has_content(await anext(long)):
            pass
        assert (await _heard(backend, _payload()))[0].text == "0"
        assert await anext(long), "the other request goes on"


@pytest.mark.slow("starts engine processes")
async def test_sleeping_model_is_unloaded_and_wakes_in_its_process(model: Path) -> None:
    async with _running(model, sleeps_in_place=True) as (backend, facts):
        process = backend.process_id
        assert await backend.sleep()
        assert await told_lines(backend, "unloaded", 1)
        assert await backend.start() == facts
        assert backend.process_id == process
        assert (await _heard(backend, _payload()))[0].text == "0"


@pytest.mark.slow("starts engine processes")
async def test_out_of_memory_error_has_advice(model: Path) -> None:
    fault = "CUDA failed with error out of memory"
    with fails(Reason.OUT_OF_MEMORY, match="use a smaller compute_type"):
        await _backend(model, {"load_error": fault}).start()
    async with _running(model, {"fault": fault}) as (backend, _):
        with fails(Reason.OUT_OF_MEMORY, match="use a smaller compute_type"):
            await _frames(backend, _payload())


@pytest.mark.slow("starts engine processes")
async def test_folder_that_is_no_whisper_model_is_rejected(model: Path) -> None:
    with fails(match="is not a Whisper model: unsupported model"):
        await _backend(model, {"load_error": "unsupported model"}).start()
    (model / "tokenizer.json").unlink()
    with fails(match=r"tokenizer\.json does not exist"):
        await _backend(model).start()


async def test_cpu_model_reserves_no_accelerator_memory(model: Path) -> None:
    (model / "model.bin").write_bytes(bytes(1_000_000))
    for device, taken in (("cpu", False), ("cuda", True)):
        engine = RUNTIME.build(*engine_settings(FasterWhisperModel, path=model, device=device))
        expected = present(await engine.forecast.expect(AS_CONFIGURED))
        assert (expected.bytes > 1_000_000) is taken, device
