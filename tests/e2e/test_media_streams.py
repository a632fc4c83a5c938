"""Images, transcriptions and speech as streams through the whole mesh: the commands, OpenAI's client, and gRPC."""

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mesh_process import MeshProcess, run_weft, running_mesh, write_config

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


def test_python_client_supports_images_transcription_and_speech(mesh: MeshProcess) -> None:
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


async def test_detached_request_is_a_task_with_a_fetchable_result(mesh: MeshProcess, tmp_path: Path) -> None:
    recording, picture, sound = tmp_path / "talk.wav", tmp_path / "cat.png", tmp_path / "hello.wav"
    recording.write_bytes(b"0123456789")

    image = (await mesh.weft("media", "image", "a cat", "--model", "painter", "-n", "2", "--detach")).strip()
    words = (await mesh.weft("media", "transcribe", str(recording), "--detach")).strip()
    speech = (await mesh.weft("media", "speak", "one two", "--voice", "amy", "--detach")).strip()
    assert (await mesh.weft("media", "image", "--fetch", image, "-o", str(picture))).splitlines() == [
        str(tmp_path / "cat-1.png"),
        str(tmp_path / "cat-2.png"),
    ]
    assert (tmp_path / "cat-2.png").read_bytes() == PNG
    assert (await mesh.weft("media", "transcribe", "--fetch", words)).strip() == "10 bytes of sound"
    assert (await mesh.weft("media", "transcribe", "--fetch", words, "--srt")).startswith(
        "1\n00:00:00,000 --> 00:00:01,000\n10\n"
    )
    await mesh.weft("media", "speak", "--fetch", speech, "-o", str(sound))
    assert sound.read_bytes().startswith(WAVE_HEAD)
    code, _, error = await run_weft("media", "image", "--fetch", words, home=mesh.home)
    assert (code, f"task {words} is for transcription, not image" in error) == (2, True), error
