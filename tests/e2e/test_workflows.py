"""A mesh with a ComfyUI that weft starts (the fake): workflows are declared, asked for by name, and make images."""

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from kit.comfyui import COMMAND, GRAPH, INPUTS
from mesh_process import MeshProcess, run_weft, running_mesh, write_config

FOLDERS = ["--output-directory", "{output}", "--input-directory", "{input}"]
DOCUMENT = {"kind": "workflow", "name": "turbo", "model": "comfy", "graph": GRAPH, "inputs": INPUTS, "outputs": ["9"]}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("comfyui")
    runner = {
        "name": "studio",
        "runtime": "comfyui",
        "models": [{"name": "comfy", "command": [*COMMAND, *FOLDERS]}],
        "first_term_seconds": 0.5,
    }
    with running_mesh(folder / "home", "--config", str(write_config(folder, runner))) as mesh:
        declared = folder / "turbo.yaml"
        declared.write_text(yaml.safe_dump(DOCUMENT))
        code, out, err = asyncio.run(run_weft("apply", "-f", str(declared), home=mesh.home))
        assert code == 0, err
        assert "workflow/turbo created" in out
        yield mesh


async def post(mesh: MeshProcess, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as http, http.post(f"{mesh.url}/v1/images/generations", json=body) as response:
        return response.status, json.loads(await response.text())


async def test_workflow_generates_an_image_over_http(mesh: MeshProcess) -> None:
    body = {"model": "workflow/turbo", "prompt": "a lighthouse", "size": "128x64", "response_format": "b64_json"}
    status, answer = await post(mesh, body)
    assert status == 200, answer
    image = base64.b64decode(answer["data"][0]["b64_json"])
    assert image.startswith(b"\x89PNG")
    assert (int.from_bytes(image[16:20]), int.from_bytes(image[20:24])) == (128, 64)


async def test_example_is_a_workflow(mesh: MeshProcess, tmp_path: Path) -> None:
    example = yaml.safe_load((Path(__file__).parents[2] / "examples" / "workflows" / "turbo.yaml").read_text())
    file = tmp_path / "example.yaml"
    file.write_text(yaml.safe_dump(example | {"name": "example"}))
    await mesh.weft("apply", "-f", str(file), "--dry-run")
