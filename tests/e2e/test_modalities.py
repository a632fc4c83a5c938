"""Models of text, of images and of nothing that is known, in one mesh: who is asked, and who is refused at once."""

import json
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from mesh_process import MeshProcess, fake_runner, run_weft, running_mesh, write_config

from weft_testing.media_files import png

IMAGE = b64encode(png(2, 2)).decode()
URL = f"data:image/png;base64,{IMAGE}"
PICTURE = {"type": "image_url", "image_url": {"url": URL}}
SEEN = {"type": "input_image", "image_url": URL}
SHOWN = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TEXT_RUNNERS = ("t1", "t2")
REQUESTS = 6
UNTAKEN = (
    "does not support images",
    "does not support tools",
    "does not support thinking",
    "does not translate into xx",
)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """The pool `mixed` has two models of text and one that takes images; `text` has a model of text alone."""
    folder = tmp_path_factory.mktemp("modalities")
    runners = [fake_runner(name, pool="mixed") for name in (*TEXT_RUNNERS, "eyes")]
    runners.append(fake_runner("alone", pool="text"))
    for runner in runners:
        if runner["name"] != "eyes":
            runner["models"][0]["extra_arguments"] = ["--text-only"]
    runners[-1]["models"][0]["target_languages"] = ["en", "nl"]
    with running_mesh(folder / "home", "--config", str(write_config(folder, *runners))) as mesh:
        yield mesh


async def post(mesh: MeshProcess, path: str, body: dict[str, Any], request_id: str = "") -> tuple[int, dict[str, Any]]:
    headers = {"X-Request-Id": request_id} if request_id else {}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{mesh.url}{path}", json=body) as response,
    ):
        return response.status, json.loads(await response.text())


def chat(model: str, **changes: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": "what is it?"}, PICTURE]
    return {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 5, **changes}


async def test_images_for_a_pool_are_sent_to_its_vision_model(mesh: MeshProcess) -> None:
    for number in range(REQUESTS):
        status, _ = await post(mesh, "/v1/chat/completions", chat("mixed"), f"seen-{number}")
        assert status == 200
        assert mesh.request_line(f"seen-{number}")["runner"] == "eyes"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat("text")),
        ("/v1/chat/completions", chat("text", messages=[{"role": "user", "content": "hi"}], tools=[TOOL])),
        ("/v1/chat/completions", chat("text", messages=[{"role": "user", "content": "hi"}], enable_thinking=True)),
        ("/v1/responses", {"model": "text", "input": [{"role": "user", "content": [SEEN]}]}),
        ("/v1/messages", {"model": "text", "max_tokens": 5, "messages": [{"role": "user", "content": [SHOWN]}]}),
        ("/api/v1/inference-tasks", {"model": "text", "body": chat("text")}),
        ("/v1/responses", {"model": "text", "input": "hallo", "target_lang_code": "xx"}),
    ],
    ids=["an image", "a tool", "thinking", "a response", "a message", "a task", "a language"],
)
async def test_input_no_model_of_the_pool_accepts_is_rejected_immediately_on_every_surface(
    path: str, body: dict[str, Any], mesh: MeshProcess
) -> None:
    status, answer = await post(mesh, path, body)
    assert (status, answer["error"].get("code", "modality_unsupported")) == (400, "modality_unsupported"), answer
    assert any(words in answer["error"]["message"] for words in UNTAKEN)
    assert not (await mesh.describe("alone")).requests, "the runner was never asked"


async def test_every_view_of_a_model_shows_the_same_capabilities(mesh: MeshProcess) -> None:
    async with aiohttp.ClientSession() as http:
        shown = [await (await http.get(f"{mesh.url}/v1/admin/models/{name}")).json() for name in ("text", "mixed")]
        listed = await (await http.get(f"{mesh.url}/v1/models/text")).json()
    text, mixed = (one["capabilities"] for one in shown)
    assert (text["modalities"], text["tools"], text["thinkingModes"]) == (["text"], False, ["default", "disabled"])
    assert mixed["modalities"] == ["text", "image", "audio"]
    assert listed["meta"]["skills"] == ["text"]
    _, described, _ = await run_weft("describe", "model", "m-alone", home=mesh.home)
    assert "image, audio, tools" in described
    assert "default, disabled" in described
    _, wide, _ = await run_weft("get", "models", "-o", "wide", home=mesh.home)
    (row,) = [line for line in wide.splitlines() if line.startswith("m-eyes")]
    assert "text,image,audio,tools" in row
