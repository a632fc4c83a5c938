"""`weft media image`, `transcribe` and `speak` against a scripted mesh: whom they ask, and what they write."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_harness import ScriptedMesh
from cli_samples import some_model

from weft.api.common.v1 import audio_pb2, chat_pb2, event_pb2, image_pb2, receipt_pb2, usage_pb2
from weft.api.registry.v1 import model_pb2
from weft.api.router.v1 import inference_service_pb2
from weft.api.router.v1.task_pb2 import TaskSpec
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft_extensions.media import image_command, media_commands, transcribe_command
from weft_extensions.media.media_commands import free_paths, numbered, slug
from weft_testing.media_files import png, wav

pytest_plugins = ("cli_mesh",)

PICTURE = png(3, 2)


def event(**fields: Any) -> event_pb2.InferenceEvent:
    return event_pb2.InferenceEvent(**fields)


def picture(index: int = 0) -> event_pb2.InferenceEvent:
    part = chat_pb2.MediaPart(data=PICTURE, media_type="image/png")
    return event(image=image_pb2.GeneratedImage(index=index, image=part, seed=7 + index))


def preview(data: bytes) -> event_pb2.InferenceEvent:
    return event(partial_image=image_pb2.PartialImage(image=chat_pb2.MediaPart(data=data, media_type="image/png")))


def worked(done: float, total: float, unit: Any = event_pb2.WORK_UNIT_STEPS) -> event_pb2.InferenceEvent:
    return event(work_progress=event_pb2.WorkProgress(unit=unit, done=done, total=total))


def ended(**usage: Any) -> event_pb2.InferenceEvent:
    receipt = receipt_pb2.Receipt(request_id="req-1", host="box", attempts=[receipt_pb2.Attempt(runner="r1")])
    receipt.usage.CopyFrom(usage_pb2.Usage(**usage))
    return event(finished=event_pb2.Finished(receipt=receipt))


def said(text: str, start: float, *words: str) -> event_pb2.InferenceEvent:
    segment = audio_pb2.TranscriptionSegment(start_seconds=start, end_seconds=start + 1.5, text=text)
    for number, word in enumerate(words):
        segment.words.add(start_seconds=start + number, end_seconds=start + number + 0.5, text=word)
    part = audio_pb2.TranscriptPart(text=text, segment=segment, language="en", duration_seconds=3.0)
    return event(transcript=part)


def able(name: str, operation: str, pool: str = "") -> model_pb2.Model:
    model = some_model(name, pool=pool)
    model.manifest.operations[:] = [model_pb2.ModelOperation.Value(f"MODEL_OPERATION_{operation}")]
    return model


@pytest.fixture
def studio(mesh: ScriptedMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedMesh:
    """One model for each operation, in an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    mesh.add(able("sdxl", "IMAGE"), able("whisper", "TRANSCRIPTION"), able("piper", "SPEECH"))
    return mesh


def files() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


def test_image_uses_the_only_image_model(studio: ScriptedMesh) -> None:
    studio.media = [event(queued=event_pb2.Queued(position=2, reason="every slot is taken")), worked(2, 4), picture()]
    studio.media.append(ended(image_steps=4, image_pixels=6))
    result = studio.run("media", "image", "a lighthouse", "-o", "lighthouse.png", "--steps", "4", "--seed", "7")
    assert (result.exit_code, result.stdout) == (0, "lighthouse.png\n"), result.output
    assert Path("lighthouse.png").read_bytes() == PICTURE
    lines = result.stderr.splitlines()
    assert lines[:3] == [
        "weft: model sdxl",
        "weft: queued, position 2: every slot is taken",
        "weft: working: 50 % of 4 steps",
    ]
    assert lines[-2:] == [
        "weft: lighthouse.png: seed 7",
        "weft: 4 steps, 0.00 megapixels, queue 0 ms, r1 on box, request req-1",
    ]
    (asked,) = studio.asked
    payload = asked.payload
    assert (asked.model, payload.prompt, payload.steps, payload.seed) == ("sdxl", "a lighthouse", 4, 7)
    assert (payload.output_format, payload.count, payload.partial_images) == ("png", 1, 0)
    assert not payload.HasField("guidance")


def test_several_images_are_numbered_and_saved_as_they_arrive(studio: ScriptedMesh) -> None:
    studio.media = [picture(1), picture(0), ended()]
    result = studio.run("media", "image", "a cat", "-o", "cat.webp", "-n", "2", "--model", "flux")
    assert result.stdout == "cat-2.webp\ncat-1.webp\n"
    assert files() == ["cat-1.webp", "cat-2.webp"]
    assert studio.asked[0].model == "flux"
    assert studio.asked[0].payload.output_format == "webp"


def test_default_file_name_comes_from_the_prompt_and_never_overwrites(studio: ScriptedMesh) -> None:
    studio.media = [picture(), ended()]
    assert studio.run("media", "image", "A Lighthouse, at night!").stdout == "a-lighthouse-at-night.png\n"
    assert studio.run("media", "image", "A Lighthouse, at night!").stdout == "a-lighthouse-at-night_2.png\n"
    studio.media = [picture(0), picture(1), ended()]
    assert studio.run("media", "image", "A Lighthouse, at night!", "-n", "2").exit_code == 0
    assert files()[:2] == ["a-lighthouse-at-night-1.png", "a-lighthouse-at-night-2.png"]


def test_further_images_of_a_workflow_get_their_own_files(studio: ScriptedMesh) -> None:
    """The second one failed because the first one's file exists, or overwrote it with --force."""
    studio.media = [picture(0), picture(1), picture(2), ended()]
    assert studio.run("media", "image", "a cat", "-o", "cat.png").stdout == "cat.png\ncat-2.png\ncat-3.png\n"
    result = studio.run("media", "image", "a cat", "-o", "dog.png", "-n", "2")
    assert result.stdout == "dog-1.png\ndog-2.png\ndog-3.png\n"


def test_existing_file_is_kept_and_no_request_is_sent(studio: ScriptedMesh) -> None:
    Path("cat-2.png").write_text("mine")
    refused = studio.run("media", "image", "a cat", "-o", "cat.png", "-n", "2")
    assert (refused.exit_code, refused.stderr) == (
        4,
        "weft: cat-2.png exists; use --force to overwrite it, or -o for another file\n",
    )
    assert not studio.asked
    studio.media = [picture(0), picture(1), ended()]
    assert studio.run("media", "image", "a cat", "-o", "cat.png", "-n", "2", "--force").exit_code == 0
    assert Path("cat-2.png").read_bytes() == PICTURE


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("image", "a", "-o", "cat.bmp"), "--output: cat.bmp must end with .png, .jpg, .jpeg, .webp"),
        (("image", "a", "-o", "no/cat.png"), "--output: there is no folder no"),
        (("image", "a", "-o", "-", "-n", "2"), "--count: cannot be standard output for several images; name a file"),
        (("image", "a", "--mask", "m.png"), "--mask: needs --from, the source image of the mask"),
        (("image", "a", "--from", "no.png"), "--from: no.png cannot be read: no such file or directory"),
        (("transcribe", "missing.wav"), "FILE: missing.wav cannot be read: no such file or directory"),
        (("transcribe", "empty.wav"), "FILE: empty.wav is empty"),
        (("transcribe", "talk.wav", "--srt", "--vtt"), "--vtt: cannot be combined with --srt"),
        (("speak", "Hi", "-f", "x"), "--file: cannot be combined with TEXT"),
        (("speak", ""), "TEXT: is empty"),
        (("speak", "x" * 5000), "TEXT: has 5000 characters; at most 4096 are allowed; send it in parts"),
        (
            ("speak", "Hi", "-o", "hi.txt"),
            "--output: hi.txt must end with .mp3, .opus, .aac, .flac, .wav, .pcm, or give --format",
        ),
        (("speak", "Hi", "--format", "midi"), "--format: must be one of mp3, opus, aac, flac, wav, pcm"),
    ],
)
def test_invalid_arguments_are_rejected_before_a_request(
    talk: ScriptedMesh, arguments: tuple[str, ...], words: str
) -> None:
    Path("empty.wav").touch()
    result = talk.run("media", *arguments)
    assert (result.exit_code, result.stderr) == (2, f"weft: {words}\n")
    assert not talk.asked


def test_image_is_made_from_source_images(studio: ScriptedMesh) -> None:
    for name in ("a.png", "b.png", "m.png"):
        Path(name).write_bytes(PICTURE)
    studio.media = [picture(), ended()]
    result = studio.run(
        *("media", "image", "a hat", "--from", "a.png", "--from", "b.png", "--mask", "m.png"),
        *("--strength", "0.5", "-o", "c.png"),
    )
    assert result.exit_code == 0, result.output
    payload = studio.asked[0].payload
    assert [(part.data, part.media_type) for part in payload.images] == [(PICTURE, "image/png")] * 2
    assert (payload.mask.data, payload.strength) == (PICTURE, 0.5)


def test_json_output_has_images_and_receipt_and_writes_no_file(studio: ScriptedMesh) -> None:
    studio.media = [picture(1), picture(0), ended(image_steps=8)]
    document = json.loads(studio.run("media", "image", "a cat", "-n", "2", "-o", "json").stdout)
    assert (document["kind"], document["model"]) == ("Images", "sdxl")
    assert [(each["index"], each["seed"]) for each in document["images"]] == [(0, 7), (1, 8)]
    assert base64.b64decode(document["images"][0]["data"]) == PICTURE
    assert document["receipt"]["imageSteps"] == 8
    assert files() == []


def test_only_the_latest_preview_is_kept_and_an_image_can_go_to_a_pipe(studio: ScriptedMesh) -> None:
    studio.media = [preview(b"first"), preview(b"second"), picture(), ended()]
    result = studio.run("media", "image", "a cat", "--preview", "now.png", "-o", "-")
    assert result.stdout_bytes == PICTURE
    assert Path("now.png").read_bytes() == b"second"
    assert studio.asked[0].payload.partial_images == 4
    assert files() == ["now.png"]


@pytest.mark.parametrize(
    ("words", "field", "option"),
    [
        ("image cat --negative dogs", "payload.negative_prompt", "--negative"),
        ("image cat --size 3x3", "size", "--size"),
        ("speak Hi -o hi.mp3", "response_format", "--format"),
    ],
)
def test_rejection_names_the_typed_option(studio: ScriptedMesh, words: str, field: str, option: str) -> None:
    studio.media = [invalid_field(field, "is not supported")]
    result = studio.run("media", *words.split())
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (2, f"weft: {option}: is not supported")
    assert files() == []


def test_error_suggests_how_to_get_an_image_model(mesh: ScriptedMesh) -> None:
    result = mesh.run("media", "image", "a cat")
    assert result.exit_code == 3
    assert result.stderr.startswith("weft: no model of this mesh makes images; ")
    assert "weft runtime install diffusers" in result.stderr
    for command, argument in (("speak", "hello"), ("transcribe", __file__)):
        assert mesh.run("media", command, argument).exit_code == 3


def test_ambiguous_models_are_listed(studio: ScriptedMesh) -> None:
    studio.add(able("flux", "IMAGE"))
    result = studio.run("media", "image", "a cat")
    assert (result.exit_code, result.stderr) == (2, "weft: --model: name one of flux, sdxl\n")


def test_models_of_one_pool_are_not_ambiguous(studio: ScriptedMesh) -> None:
    studio.add(able("whisper", "TRANSCRIPTION", pool="ears"), able("whisper-2", "TRANSCRIPTION", pool="ears"))
    Path("a.wav").write_bytes(wav(seconds=0.1))
    studio.media = [said("Hello.", 0), ended()]
    assert studio.run("media", "transcribe", "a.wav").exit_code == 0
    assert studio.asked[0].model == "ears"


def interrupted(*events: event_pb2.InferenceEvent) -> Iterator[event_pb2.InferenceEvent]:
    yield from events
    raise KeyboardInterrupt


def test_ctrl_c_reports_the_cancellation_and_saved_files(
    studio: ScriptedMesh, capsys: pytest.CaptureFixture[str]
) -> None:
    target = image_command.ImageTarget(output="cat.png", prompt="a cat", count=2, force=False)
    with pytest.raises(typer.Exit) as ended_by:
        image_command._make(interrupted(picture(0)), target, None)
    assert ended_by.value.exit_code == 130
    assert capsys.readouterr().err.endswith("weft: cancelled; saved cat-1.png\n")
    del studio


@pytest.fixture
def talk(studio: ScriptedMesh) -> ScriptedMesh:
    Path("talk.wav").write_bytes(wav(seconds=0.1))
    audio = event_pb2.WORK_UNIT_AUDIO_SECONDS
    studio.media = [worked(0, 3, audio), said(" One fish.", 0, "One", "fish."), worked(1.5, 3, audio)]
    studio.media += [said(" Two --> fish.", 61.25, "Two"), ended(audio_milliseconds=3000)]
    return studio


def test_transcription_streams_text_with_progress_in_seconds(talk: ScriptedMesh) -> None:
    result = talk.run("media", "transcribe", "talk.wav", "--language", "en", "--prompt", "fish")
    assert (result.exit_code, result.stdout) == (0, "One fish. Two --> fish.\n"), result.output
    assert "weft: working: 50 % of 3 s of audio" in result.stderr
    assert result.stderr.endswith("weft: 3.0 s of audio, queue 0 ms, r1 on box, request req-1\n")
    (asked,) = talk.asked
    payload = asked.payload
    assert (asked.model, payload.language, payload.prompt, payload.translate) == ("whisper", "en", "fish", False)
    assert (payload.audio.media_type, payload.with_segments) == ("audio/wav", False)


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--srt", "1\n00:00:00,000 --> 00:00:01,500\nOne fish.\n\n2\n00:01:01,250 --> 00:01:02,750\nTwo -> fish.\n"),
        (
            "--vtt",
            "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne fish.\n\n00:01:01.250 --> 00:01:02.750\nTwo -> fish.\n",
        ),
    ],
)
def test_captions_are_written_to_a_file(talk: ScriptedMesh, flag: str, text: str) -> None:
    result = talk.run("media", "transcribe", "talk.wav", flag, "-o", "talk.txt")
    assert (result.exit_code, result.stdout) == (0, ""), result.output
    assert Path("talk.txt").read_text() == text
    assert files() == ["talk.txt", "talk.wav"]
    assert talk.asked[0].payload.with_segments


def test_json_output_has_segments_and_requested_words(talk: ScriptedMesh) -> None:
    document = json.loads(talk.run("media", "transcribe", "talk.wav", "--json", "--words", "--translate").stdout)
    assert (document["task"], document["language"], document["duration"]) == ("translate", "en", 3.0)
    assert [segment["text"] for segment in document["segments"]] == [" One fish.", " Two --> fish."]
    assert [word["word"] for word in document["words"]] == ["One", "fish.", "Two"]
    assert talk.asked[0].payload.with_words
    assert talk.asked[0].payload.translate


def test_failed_transcription_leaves_no_file(talk: ScriptedMesh) -> None:
    talk.media.insert(2, WeftError(Reason.SERVER_DIED, "it died"))
    result = talk.run("media", "transcribe", "talk.wav", "-o", "talk.txt")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, "weft: it died")
    assert files() == ["talk.wav"]


def test_captions_fail_if_the_model_returns_no_timestamps(talk: ScriptedMesh) -> None:
    talk.media = [event(transcript=audio_pb2.TranscriptPart(text="One.")), ended()]
    result = talk.run("media", "transcribe", "talk.wav", "--srt", "-o", "talk.srt")
    assert (result.exit_code, files()) == (1, ["talk.wav"])
    assert "the model reports no times" in result.stderr


@pytest.mark.parametrize(("flag", "text"), [("--srt", ""), ("--vtt", "WEBVTT\n")])
def test_recording_without_speech_has_no_captions(talk: ScriptedMesh, flag: str, text: str) -> None:
    talk.media = [event(transcript=audio_pb2.TranscriptPart(language="en", duration_seconds=3.0)), ended()]
    result = talk.run("media", "transcribe", "talk.wav", flag)
    assert (result.exit_code, result.stdout) == (0, text), result.output


def test_recording_without_speech_has_no_words(talk: ScriptedMesh) -> None:
    talk.media = [event(transcript=audio_pb2.TranscriptPart(language="en", duration_seconds=3.0)), ended()]
    result = talk.run("media", "transcribe", "talk.wav", "--words")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["words"] == []


def test_words_fail_if_the_model_returns_times_of_segments_alone(talk: ScriptedMesh) -> None:
    talk.media = [said(" One fish.", 0.0), ended()]
    result = talk.run("media", "transcribe", "talk.wav", "--words")
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    assert "the model reports no times" in result.stderr


def test_fetched_words_of_a_task_without_them_are_a_usage_error(
    studio: ScriptedMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said that the model reports no times."""
    spec = TaskSpec(model="whisper")
    spec.transcription.with_segments = True
    monkeypatch.setattr(transcribe_command, "fetched", lambda *_: ([said(" One fish.", 0.0), ended()], spec))
    result = studio.run("media", "transcribe", "--fetch", "task-1", "--words")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--words: task task-1 was submitted without it" in result.stderr
    assert studio.run("media", "transcribe", "--fetch", "task-1", "--json").exit_code == 0


def test_oversized_recording_is_rejected_with_advice(talk: ScriptedMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_commands, "MAX_MEDIA_BYTES", 10)
    result = talk.run("media", "transcribe", "talk.wav")
    assert result.exit_code == 2
    assert transcribe_command._ADVICE in result.stderr


def test_recording_is_read_from_standard_input(talk: ScriptedMesh) -> None:
    assert talk.run("media", "transcribe", "-", stdin=b"sound").stdout == "One fish. Two --> fish.\n"
    assert talk.asked[0].payload.audio.data == b"sound"


def spoken() -> list[Any]:
    response = inference_service_pb2.SpeakResponse
    receipt = receipt_pb2.Receipt(request_id="req-1", usage=usage_pb2.Usage(audio_milliseconds=1200))
    return [response(data=b"RIFF", media_type="audio/wav"), response(data=b"sound"), response(receipt=receipt)]


def test_speech_is_saved_to_a_file_with_an_extension_for_its_format(studio: ScriptedMesh) -> None:
    studio.media = spoken()
    result = studio.run("media", "speak", "Hello.", "-o", "hello.wav", "--voice", "amy", "--speed", "1.5")
    assert (result.exit_code, result.stdout) == (0, "hello.wav\n"), result.output
    assert Path("hello.wav").read_bytes() == b"RIFFsound"
    assert result.stderr.splitlines()[-1] == "weft: 1.2 s of audio, queue 0 ms, request req-1"
    payload = studio.asked[0].payload
    assert (payload.input, payload.voice, payload.format, payload.speed) == ("Hello.", "amy", "wav", 1.5)


def test_piped_speech_is_bytes_and_text_can_come_from_a_file_or_pipe(studio: ScriptedMesh) -> None:
    studio.media = spoken()
    Path("text.txt").write_text("From a file.\n")
    assert studio.run("media", "speak", "-f", "text.txt", "--format", "mp3").stdout_bytes == b"RIFFsound"
    assert studio.run("media", "speak", stdin="From a pipe.").stdout_bytes == b"RIFFsound"
    assert [(asked.payload.input, asked.payload.format) for asked in studio.asked] == [
        ("From a file.", "mp3"),
        ("From a pipe.", ""),
    ]
    assert files() == ["text.txt"]


def test_device_is_written_and_not_replaced_by_a_file(studio: ScriptedMesh) -> None:
    """As root, --force replaced /dev/null itself. A link keeps pointing to its file."""
    studio.media = spoken()
    Path("null").symlink_to("/dev/null")
    Path("link").symlink_to("said.wav")
    for name in ("null", "link"):
        result = studio.run("media", "speak", "Hello.", "--format", "wav", "-o", name, "--force")
        assert (result.exit_code, Path(name).is_symlink()) == (0, True), result.output
    assert Path("null").is_char_device()
    assert Path("said.wav").read_bytes() == b"RIFFsound"
    assert files() == ["link", "null", "said.wav"]


def test_file_names_are_built_from_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert slug("../../etc/passwd") == "etc-passwd"
    assert slug("💡") == "image"
    assert len(slug("word " * 100)) <= 48
    assert [str(path) for path in numbered(Path("a/b.png"), 2)] == ["a/b-1.png", "a/b-2.png"]
    Path("a-2.png").touch()
    assert [str(path) for path in free_paths("a", "png", 2)] == ["a_2-1.png", "a_2-2.png"]
