"""Images and recordings in chats, into the prompt of the real llama.cpp server, on every surface.

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

from weft.client import WeftError, connect
from weft.kernel.reasons import Reason
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


async def post(mesh: MeshProcess, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as http, http.post(f"{mesh.url}{path}", json=body) as response:
        return response.status, json.loads(await response.text())


def chat(model: str, *parts: dict[str, Any]) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": TEXT}]
    return {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": LIMIT}


IMAGE_PART = {"type": "image_url", "image_url": {"url": URL}}
AUDIO_PART = {"type": "input_audio", "input_audio": {"data": AUDIO, "format": "wav"}}


def response(model: str, *parts: dict[str, Any]) -> dict[str, Any]:
    content = [*parts, {"type": "input_text", "text": TEXT}]
    return {"model": model, "input": [{"role": "user", "content": content}], "max_output_tokens": LIMIT, "store": False}


def message(model: str, *parts: dict[str, Any]) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": TEXT}]
    return {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": LIMIT}


def ollama(model: str, *images: str) -> dict[str, Any]:
    turn = {"role": "user", "content": TEXT, "images": list(images)}
    return {"model": model, "messages": [turn], "stream": False, "options": {"num_predict": LIMIT}}


SHOWN = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}}
SURFACES = [
    ("/v1/chat/completions", chat("eyes"), chat("eyes", IMAGE_PART), IMAGE_TOKENS),
    ("/v1/chat/completions", chat("ears"), chat("ears", AUDIO_PART), SOUND_TOKENS),
    ("/v1/responses", response("eyes"), response("eyes", {"type": "input_image", "image_url": URL}), IMAGE_TOKENS),
    ("/v1/responses", response("ears"), response("ears", AUDIO_PART), SOUND_TOKENS),
    ("/v1/messages", message("eyes"), message("eyes", SHOWN), IMAGE_TOKENS),
    ("/api/chat", ollama("eyes"), ollama("eyes", IMAGE), IMAGE_TOKENS),
]


def prompt_tokens(answer: dict[str, Any]) -> int:
    usage = answer.get("usage", answer)
    found = [usage.get(name) for name in ("prompt_tokens", "input_tokens", "prompt_eval_count")]
    return next(int(count) for count in found if count is not None)


@pytest.mark.parametrize(
    ("path", "without", "shown", "tokens"),
    SURFACES,
    ids=["chat image", "chat audio", "responses image", "responses audio", "messages image", "ollama image"],
)
async def test_image_or_audio_reaches_the_prompt_on_every_surface(
    mesh: MeshProcess, path: str, without: dict[str, Any], shown: dict[str, Any], tokens: int
) -> None:
    status, plain = await post(mesh, path, without)
    assert status == 200, plain
    status, seen = await post(mesh, path, shown)
    assert status == 200, seen
    assert prompt_tokens(seen) >= prompt_tokens(plain) + tokens


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (chat("ears", IMAGE_PART), "ears does not support images"),
        (chat("eyes", AUDIO_PART), "eyes does not support audio"),
    ],
    ids=["an image to ears", "a recording to eyes"],
)
async def test_media_the_projector_cannot_encode_is_rejected_immediately(
    mesh: MeshProcess, body: dict[str, Any], words: str
) -> None:
    status, answer = await post(mesh, "/v1/chat/completions", body)
    assert (status, answer["error"]["code"]) == (400, "modality_unsupported")
    assert words in answer["error"]["message"]


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


def test_client_sends_files_with_a_message(mesh: MeshProcess) -> None:
    with connect(mesh.grpc) as client:
        turn = {"role": "user", "content": TEXT, "images": [PICTURE, PICTURE]}
        *_, last = client.chat("eyes", [turn], max_tokens=LIMIT, timeout=60.0)  # type: ignore[list-item]  # a literal
        *_, plain = client.chat("eyes", TEXT, max_tokens=LIMIT, timeout=60.0)
        counted = last.finished.receipt.usage.prompt_tokens - plain.finished.receipt.usage.prompt_tokens
        assert counted >= 2 * IMAGE_TOKENS
        with pytest.raises(WeftError) as refused:
            list(client.chat("ears", [turn], timeout=60.0))  # type: ignore[list-item]  # a literal
    assert refused.value.reason is Reason.MODALITY_UNSUPPORTED
