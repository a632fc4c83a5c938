"""A model of images and one of text with room for one of them: they take turns as two models of text do."""

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import grpc
import pytest
from mesh_process import MeshProcess, fake_runner, run_weft, running_mesh, write_config

from weft.api.common.v1 import image_pb2
from weft.api.router.v1 import inference_service_pb2_grpc
from weft.api.router.v1.inference_service_pb2 import GenerateImagesRequest
from weft_testing.fake_backend.process import fake_backend_command

MODEL_MB = 2000
BUDGET = {"declared": [{"name": "budget", "memory_mb": 3000}]}
STEPS = 4


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """The models `words` and `pictures` on one device that holds either."""
    folder = tmp_path_factory.mktemp("pictures")
    words = fake_runner("box", pool="")
    words["models"] = [{"name": "words", "path": __file__, "slots": 2, "memory_mb": MODEL_MB}]
    told = ("--port", "{port}", "--alias", "{name}", "--parallel", "{slots}", "--offers", "image")
    pictures = {
        "name": "pictures",
        "operations": ["image"],
        "slots": 1,
        "memory_mb": MODEL_MB,
        "start_asleep": True,
        "command": fake_backend_command(*told),
    }
    studio = {"name": "studio", "runtime": "server", "models": [pictures]}
    config = write_config(folder, words, studio, accelerators=BUDGET)
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


async def post(mesh: MeshProcess, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, str]]:
    async with aiohttp.ClientSession() as http, http.post(f"{mesh.url}{path}", json=body) as response:
        return response.status, await response.json(), {name.lower(): value for name, value in response.headers.items()}


async def paint(mesh: MeshProcess) -> tuple[int, dict[str, Any], dict[str, str]]:
    body = {"model": "pictures", "prompt": "a lighthouse", "n": 2, "size": "512x512", "steps": STEPS}
    return await post(mesh, "/v1/images/generations", body)


async def write(mesh: MeshProcess) -> tuple[int, dict[str, Any], dict[str, str]]:
    body = {"model": "words", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    return await post(mesh, "/v1/chat/completions", body)


async def held(mesh: MeshProcess) -> set[str]:
    """Whose memory is leased; never more than the device has."""
    async with aiohttp.ClientSession() as http, http.get(f"{mesh.url}/v1/admin/gpu-memory") as response:
        found = await response.json()
    (device,) = [device for host in found["hosts"] for device in host["devices"]]
    assert device["bookedBytes"] <= device["totalBytes"] - device["marginBytes"]
    return {lease["purpose"] for host in found["hosts"] for lease in host["leases"] if lease["state"] == "held"}


@pytest.mark.nightly("swaps models again, of other runtimes")
async def test_a_model_of_images_and_one_of_text_give_way_to_each_other(mesh: MeshProcess) -> None:
    assert await held(mesh) == {"words"}
    for ask, name in ((paint, "pictures"), (write, "words"), (paint, "pictures")):
        status, answer, _ = await ask(mesh)
        assert status == 200, answer
        assert await held(mesh) == {name}


@pytest.mark.nightly("swaps models again, of other runtimes")
async def test_both_are_served_when_many_want_them_and_they_swap_seldom(mesh: MeshProcess) -> None:
    before = len(mesh.log_lines("woke"))
    answers = await asyncio.gather(*(ask(mesh) for _ in range(8) for ask in (paint, write)))
    assert [status for status, _, _ in answers] == [200] * 16
    loads = len(mesh.log_lines("woke")) - before
    assert 1 <= loads <= 6, "requests for the same model are served together"


async def test_the_receipt_and_the_usage_of_an_image_tell_its_work(mesh: MeshProcess) -> None:
    payload = image_pb2.ImagePayload(prompt="a lighthouse", count=2, steps=STEPS)
    request = GenerateImagesRequest(model="pictures", payload=payload)
    with grpc.insecure_channel(mesh.grpc) as channel:
        made = inference_service_pb2_grpc.InferenceServiceStub(channel).GenerateImages(request, timeout=60.0)
    # The fake's images have one pixel each.
    assert (made.receipt.usage.image_steps, made.receipt.usage.image_pixels) == (2 * STEPS, 2)
    _, _, headers = await paint(mesh)
    assert headers["x-image-pixels"] == "2"
    code, explained, error = await run_weft("explain", made.receipt.request_id, home=mesh.home)
    assert code == 0, error
    assert f"{2 * STEPS} steps" in explained
    code, usage, error = await run_weft("usage", "--by", "model", "-o", "csv", home=mesh.home)
    assert code == 0, error
    header, *rows = (line.split(",") for line in usage.splitlines())
    row = next(dict(zip(header, line, strict=True)) for line in rows if line[0] == "pictures")
    assert int(row["image_steps"]) >= 2 * STEPS
    assert int(row["image_pixels"]) >= 4
