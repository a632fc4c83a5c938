"""A model of images and one of text with room for one of them: they take turns as two models of text do."""

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
