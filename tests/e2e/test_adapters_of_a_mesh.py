"""An adapter of the demo model in a whole mesh: listed, asked, counted and unloaded under its own name."""

from collections.abc import Iterator
from typing import Any

import aiohttp
import psutil
import pytest
from kit.tiny_gguf import write_adapter
from mesh_process import MeshProcess, run_weft, running_mesh, write_config

from weft_app.compose.demo import demo_model_path

pytestmark = [pytest.mark.real, pytest.mark.slow("a real engine")]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("adapters")
    adapter = {"name": "pirate", "path": str(write_adapter(folder / "pirate.gguf"))}
    model = {"name": "smol", "path": str(demo_model_path()), "threads": 1, "slots": 2, "adapters": [adapter]}
    runner = {"name": "local", "runtime": "llama_server", "models": [model]}
    with running_mesh(folder / "home", "--config", str(write_config(folder, runner))) as mesh:
        yield mesh


async def _ask(mesh: MeshProcess, model: str, request_id: str) -> dict[str, Any]:
    body = {"model": model, "temperature": 0, "max_tokens": 12}
    question = {"role": "user", "content": "What is the capital of France? Answer with one word."}
    async with (
        aiohttp.ClientSession(headers={"X-Request-Id": request_id}) as http,
        http.post(f"{mesh.url}/v1/chat/completions", json={**body, "messages": [question]}) as response,
    ):
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def _get(mesh: MeshProcess, path: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as http, http.get(f"{mesh.url}{path}") as response:
        found: dict[str, Any] = await response.json()
        return found


async def test_adapter_is_served_as_a_model_by_the_engine_of_its_base_model(mesh: MeshProcess) -> None:
    listed = {each["id"]: each["meta"] for each in (await _get(mesh, "/v1/models"))["data"]}
    assert listed["pirate"]["base_models"] == ["smol"]
    assert "base_models" not in listed["smol"]
    assert "embedding" in listed["smol"]["operations"]
    assert "embedding" not in listed["pirate"]["operations"]
    plain, adapted = await _ask(mesh, "smol", "plain"), await _ask(mesh, "pirate", "adapted")
    assert "Paris" in plain["choices"][0]["message"]["content"]
    assert "Paris" not in adapted["choices"][0]["message"]["content"]
    assert (plain["model"], adapted["model"]) == ("smol", "pirate")
    assert mesh.request_line("adapted")["model"] == "pirate"
    code, output, _ = await run_weft("get", "models", "-o", "wide", home=mesh.home)
    assert code == 0
    assert output.splitlines()[1].split()[:1] == ["pirate"]
    assert "smol" in output.splitlines()[1]


async def test_unloading_an_adapter_stops_the_engine_and_the_next_request_reloads_it(
    mesh: MeshProcess,
) -> None:
    engine = (await mesh.describe("local")).process_id
    code, _, errors = await run_weft("unload", "pirate", home=mesh.home)
    assert code == 0, errors
    assert not psutil.pid_exists(engine)
    states = {each.model: each for each in (await mesh.runners())[0].capability.instances}
    assert {name: state.base_model for name, state in states.items()} == {"smol": "", "pirate": "smol"}
    assert (await _ask(mesh, "pirate", "woken"))["model"] == "pirate"
    woken = (await mesh.describe("local")).process_id
    assert woken
    assert (await _ask(mesh, "smol", "too"))["model"] == "smol"
    assert (await mesh.describe("local")).process_id == woken, "one load serves both"
