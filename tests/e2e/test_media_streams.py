"""Images, transcriptions and speech as streams through the whole mesh: the commands, OpenAI's client, and gRPC."""

import asyncio
import base64
import contextlib
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from mesh_process import WEFT, MeshProcess, eventually, run_weft, running_mesh, user_environment, write_config

from weft.client import connect
from weft_testing.fake_backend.media_routes import PNG, WAVE_HEAD
from weft_testing.fake_backend.process import fake_backend_command
from weft_testing.media_files import wav

OPERATIONS = {"painter": ["image"], "ears": ["transcription"], "voice": ["speech"]}


@contextlib.contextmanager
def _server(*flags: str) -> Iterator[str]:
    command = fake_backend_command("--die-with-parent", "--offers", "image,transcription,speech", *flags)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            found = next(found for line in process.stdout if (found := re.search(r"listening on (http://\S+)", line)))
            yield f"{found[1]}/v1"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """A model for each operation, and one whose images never come, of a pool with another name."""
    folder = tmp_path_factory.mktemp("media")
    with _server() as url, _server("--stall-after-tokens", "1") as stuck:
        models: list[dict[str, Any]] = [
            {"name": name, "url": url, "operations": operations} for name, operations in OPERATIONS.items()
        ]
        models.append({"name": "stuck", "url": stuck, "operations": ["image"], "slots": 1})
        config = write_config(folder, {"name": "attached", "runtime": "openai_http", "models": models})
        with running_mesh(folder / "home", "--config", str(config)) as mesh:
            yield mesh


@pytest.fixture
def sdk(mesh: MeshProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_previews_and_images_come_from_the_engine_to_the_client(sdk: openai.OpenAI) -> None:
    stream = sdk.images.generate(
        model="painter", prompt="a cat", n=2, stream=True, partial_images=2, extra_body={"seed": 7}
    )
    events = list(stream)
    assert [event.type.partition(".")[2] for event in events] == [
        *("partial_image", "partial_image", "completed"),
        *("partial_image", "partial_image", "completed"),
    ]
    assert {base64.b64decode(event.b64_json) for event in events} == {PNG}
    last: dict[str, Any] = events[-1].to_dict()
    assert (last["seed"], last["size"], last["usage"]["image_steps"]) == (8, "1x1", 4)


def test_an_edit_streams_as_well(sdk: openai.OpenAI) -> None:
    image = ("a.png", PNG, "image/png")
    events = list(sdk.images.edit(model="painter", prompt="a hat", image=image, stream=True, partial_images=1))
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]


def test_the_python_client_has_all_three(mesh: MeshProcess) -> None:
    with connect(mesh.grpc) as client:
        kinds = [
            event.WhichOneof("event") for event in client.stream_images("painter", "a cat", partial_images=1, count=2)
        ]
        (made,) = client.generate_images("painter", "a cat", output_format="png")
        heard = client.transcribe("ears", wav(seconds=0.1), with_words=True)
        pieces = [
            event.transcript.text
            for event in client.stream_transcription("ears", b"12345")
            if event.HasField("transcript")
        ]
        parts = list(client.speak("voice", "one two", voice="amy"))
    assert kinds.count("partial_image") == kinds.count("image") == 2
    assert kinds[-1] == "finished"
    assert made.image.data == PNG
    assert heard.text.endswith("bytes of sound")
    assert [word.text for word in heard.segments[1].words] == ["bytes"]
    assert pieces == ["5", " bytes", " of", " sound"]
    assert b"".join(part.data for part in parts).startswith(WAVE_HEAD)
    assert parts[-1].receipt.model == "voice"


async def test_the_commands_find_their_model_and_write_files(mesh: MeshProcess, tmp_path: Path) -> None:
    picture, captions, sound = tmp_path / "cat.png", tmp_path / "talk.vtt", tmp_path / "hello.wav"
    code, out, error = await run_weft("image", "a cat", "--model", "painter", "-o", str(picture), home=mesh.home)
    assert (code, out) == (0, f"{picture}\n"), error
    assert picture.read_bytes() == PNG
    recording = tmp_path / "talk.wav"
    recording.write_bytes(b"0123456789")
    code, out, error = await run_weft("transcribe", str(recording), home=mesh.home)
    assert (code, out) == (0, "10 bytes of sound\n"), error
    code, _, error = await run_weft("transcribe", str(recording), "--vtt", "-o", str(captions), home=mesh.home)
    assert code == 0, error
    assert captions.read_text().startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.000\n10\n")
    code, _, error = await run_weft("speak", "one two", "--voice", "amy", "-o", str(sound), home=mesh.home)
    assert code == 0, error
    assert sound.read_bytes().startswith(WAVE_HEAD)


async def test_a_name_that_nothing_has_is_answered_with_those_that_are_close(mesh: MeshProcess, tmp_path: Path) -> None:
    code, _, error = await run_weft(
        "image", "a cat", "--model", "paintr", "-o", str(tmp_path / "a.png"), home=mesh.home
    )
    assert (code, "painter" in error) == (3, True), error
    code, _, error = await run_weft("image", "a cat", "--model", "ears", "-o", str(tmp_path / "a.png"), home=mesh.home)
    assert code == 1
    assert "ears does not offer image; it offers transcription" in error


async def test_ctrl_c_ends_the_work_and_leaves_no_file(mesh: MeshProcess, tmp_path: Path) -> None:
    picture = tmp_path / "cat.png"
    command = ("image", "a cat", "--model", "stuck", "-o", str(picture), "--preview", str(tmp_path / "now.png"))
    process = await asyncio.create_subprocess_exec(
        *WEFT,
        *command,
        env={**user_environment(), "WEFT_HOME": str(mesh.home)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    await eventually((tmp_path / "now.png").exists, 30, "no preview came")
    process.send_signal(signal.SIGINT)
    out, error = await process.communicate()
    assert (process.returncode, out) == (130, b""), error
    assert b"cancelled; no image was saved" in error
    assert not picture.exists()

    async def is_free() -> bool:
        found = await run_weft("get", "requests", "--state", "cancelled", "-o", "name", home=mesh.home)
        return bool(found[1].strip())

    await eventually(is_free, 20, "the request goes on")


async def test_a_detached_request_is_a_task_whose_result_is_fetched(mesh: MeshProcess, tmp_path: Path) -> None:
    recording, picture, sound = tmp_path / "talk.wav", tmp_path / "cat.png", tmp_path / "hello.wav"
    recording.write_bytes(b"0123456789")

    async def weft(*arguments: str) -> str:
        code, out, error = await run_weft(*arguments, home=mesh.home)
        assert code == 0, error
        return out.strip()

    image = await weft("image", "a cat", "--model", "painter", "-n", "2", "--detach")
    words = await weft("transcribe", str(recording), "--detach")
    speech = await weft("speak", "one two", "--voice", "amy", "--detach")
    assert (await weft("image", "--fetch", image, "-o", str(picture))).splitlines() == [
        str(tmp_path / "cat-1.png"),
        str(tmp_path / "cat-2.png"),
    ]
    assert (tmp_path / "cat-2.png").read_bytes() == PNG
    assert await weft("transcribe", "--fetch", words) == "10 bytes of sound"
    assert (await weft("transcribe", "--fetch", words, "--srt")).startswith("1\n00:00:00,000 --> 00:00:01,000\n10\n")
    await weft("speak", "--fetch", speech, "-o", str(sound))
    assert sound.read_bytes().startswith(WAVE_HEAD)
    code, _, error = await run_weft("image", "--fetch", words, home=mesh.home)
    assert (code, f"task {words} is about transcription, not image" in error) == (2, True), error
