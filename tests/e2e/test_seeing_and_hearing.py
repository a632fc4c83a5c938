"""Images and recordings in chats, into the prompt of the real llama.cpp server.

The projectors are random numbers: what the model says of a picture means nothing, but the picture is in its prompt.
"""

import json
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kit.tiny_projector import IMAGE_TOKENS, write_audio_projector, write_vision_projector
from mesh_process import MeshProcess, run_weft, running_mesh, write_config
from shallow_model import write_shallow_model

from weft.client import connect
from weft_testing.media_files import png, wav

pytestmark = pytest.mark.real

TEXT = "What is this?"
PICTURE, SOUND = png(30, 20), wav(seconds=1.0)
IMAGE, AUDIO = b64encode(PICTURE).decode(), b64encode(SOUND).decode()
URL = f"data:image/png;base64,{IMAGE}"
SOUND_TOKENS = 100
"""At least so many of 30 s, to which every recording is padded."""
LIMIT = 4


def runner(folder: Path) -> dict[str, Any]:
    common = {"path": str(write_shallow_model(folder / "shallow.gguf")), "slots": 1, "context_tokens": 2048}
    eyes, ears = folder / "eyes-mmproj.gguf", folder / "ears-mmproj.gguf"
    return {
        "name": "box",
        "runtime": "llama_server",
        "models": [
            {"name": "eyes", "mmproj_path": str(write_vision_projector(eyes)), **common},
            {"name": "ears", "mmproj_path": str(write_audio_projector(ears)), **common},
        ],
    }


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """A model that takes images, and one that takes recordings."""
    folder = tmp_path_factory.mktemp("seeing")
    with running_mesh(folder / "home", "--config", str(write_config(folder, runner(folder)))) as mesh:
        yield mesh


async def post(mesh: MeshProcess, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as http, http.post(f"{mesh.url}/v1/chat/completions", json=body) as response:
        return response.status, json.loads(await response.text())


def chat(model: str, *parts: dict[str, Any]) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": TEXT}]
    return {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": LIMIT}


IMAGE_PART = {"type": "image_url", "image_url": {"url": URL}}
AUDIO_PART = {"type": "input_audio", "input_audio": {"data": AUDIO, "format": "wav"}}


@pytest.mark.parametrize(
    ("model", "part", "tokens"), [("eyes", IMAGE_PART, IMAGE_TOKENS), ("ears", AUDIO_PART, SOUND_TOKENS)]
)
async def test_image_or_audio_reaches_the_prompt(
    mesh: MeshProcess, model: str, part: dict[str, Any], tokens: int
) -> None:
    status, plain = await post(mesh, chat(model))
    assert status == 200, plain
    status, seen = await post(mesh, chat(model, part))
    assert status == 200, seen
    assert seen["usage"]["prompt_tokens"] >= plain["usage"]["prompt_tokens"] + tokens


async def test_capabilities_match_the_projectors_the_server_loaded(mesh: MeshProcess) -> None:
    async with aiohttp.ClientSession() as http:
        shown = [await (await http.get(f"{mesh.url}/v1/admin/models/{name}")).json() for name in ("eyes", "ears")]
    assert [one["capabilities"]["modalities"] for one in shown] == [["text", "image"], ["text", "audio"]]


@pytest.mark.parametrize("verb", ["chat", "run"])
async def test_cli_sends_a_file_to_the_model(mesh: MeshProcess, tmp_path: Path, verb: str) -> None:
    (tmp_path / "photo.png").write_bytes(PICTURE)
    (tmp_path / "talk.wav").write_bytes(SOUND)
    for model, flags in (("eyes", ("--image", "photo.png")), ("ears", ("--audio", "talk.wav"))):
        option, name = flags
        arguments = (verb, model, TEXT, option, str(tmp_path / name), "--max-tokens", str(LIMIT))
        code, _, error = await run_weft(*arguments, home=mesh.home)
        assert code == 0, error
        assert "tokens" in error.splitlines()[-1]
        asked = int(error.splitlines()[-1].split(" + ")[0].split()[-1])
        with connect(mesh.grpc) as client:
            *_, last = client.chat(model, TEXT, max_tokens=LIMIT, timeout=60.0)
        assert asked > last.finished.receipt.usage.prompt_tokens
