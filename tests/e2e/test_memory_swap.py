"""Two models and room for one: what a user sees who asks for either, and what is left when something is killed."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from chats import chat
from mesh_process import MeshProcess, eventually, fake_runner, run_weft, running_mesh, write_config

MODEL_MB = 2000
BUDGET = {"declared": [{"name": "budget", "memory_mb": 3000}]}
MIB = 1024**2


def two_models(tmp_path: Path, **model: Any) -> Path:
    """One runner with two models of which the declared device holds one."""
    runner = fake_runner("box", pool="")
    runner["models"] = [
        {"name": name, "path": __file__, "slots": 2, "memory_mb": MODEL_MB, "start_asleep": name == "second", **model}
        for name in ("first", "second")
    ]
    return write_config(tmp_path, runner, accelerators=BUDGET)


async def processes(mesh: MeshProcess) -> dict[str, dict[str, Any]]:
    """What `weft ps` shows, by model."""
    out = await mesh.weft("ps", "-o", "json")
    return {row["model"]: row for row in json.loads(out)["items"]}


async def leases(mesh: MeshProcess) -> list[dict[str, Any]]:
    """Every lease there is."""
    async with aiohttp.ClientSession() as http, http.get(f"{mesh.url}/v1/admin/gpu-memory") as response:
        found = await response.json()
    for host in found["hosts"]:
        for device in host["devices"]:
            assert device["bookedBytes"] <= device["totalBytes"] - device["marginBytes"], "booked twice"
    return [lease for host in found["hosts"] for lease in host["leases"]]


@pytest.fixture(scope="module")
def shared_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("memory")
    with running_mesh(folder / "home", "--config", str(two_models(folder))) as mesh:
        yield mesh


@pytest.fixture
async def mesh(shared_mesh: MeshProcess) -> MeshProcess:
    """The first model is loaded, and not pinned."""
    for model in ("first", "second"):
        assert (await run_weft("unload", model, home=shared_mesh.home))[0] == 0
    assert (await chat(shared_mesh.url, "first"))[0] == 200
    return shared_mesh


async def test_model_loads_once_with_overridden_settings(mesh: MeshProcess) -> None:
    assert (await processes(mesh))["first"]["contextTokens"] == 2048
    code, out, error = await run_weft("load", "first", "--ctx", "512", "--set", "slots=1", home=mesh.home)
    assert code == 0, error
    assert out.startswith("model/first loaded (in ")
    row = (await processes(mesh))["first"]
    assert (row["contextTokens"], row["slotsTotal"]) == (512, 1)
    code, _, error = await run_weft("load", "first", "--set", "temperature=2", home=mesh.home)
    assert code == 2
    assert "temperature" in error
    assert (await run_weft("unload", "first", home=mesh.home))[0] == 0
    assert (await chat(mesh.url, "first"))[0] == 200
    assert (await processes(mesh))["first"]["contextTokens"] == 2048


async def test_model_that_can_never_fit_is_rejected_with_figures_and_reported_at_startup(
    tmp_path: Path,
) -> None:
    runner = fake_runner("box", pool="")
    model = {"path": __file__, "memory_mb": 9000}
    runner["models"] = [{"name": "m-box", **model}, {"name": "m-asleep", "start_asleep": True, **model}]
    config = write_config(tmp_path, runner, accelerators=BUDGET)
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        (line,) = [line for line in (tmp_path / "home.out").read_text().splitlines() if line.startswith("warn m-box")]
        assert "m-box: hibernating on box: m-box needs 8.8 GiB" in line
        code, _, error = await run_weft("load", "m-asleep", home=mesh.home)
        assert code == 1
        assert "8.8 GiB" in error
        assert await leases(mesh) == []


async def test_killed_runner_frees_its_memory_and_reloads_its_model(mesh: MeshProcess) -> None:
    (before,) = await leases(mesh)
    os.kill(mesh.facts["pids"]["runners"]["box"], signal.SIGKILL)

    async def has_a_new_lease() -> bool:
        found = await leases(mesh)
        return [lease["purpose"] for lease in found] == ["first"] and found[0]["leaseId"] != before["leaseId"]

    await eventually(has_a_new_lease, 20.0, "the memory does not come back")
    assert (await chat(mesh.url, "second"))[0] == 200
