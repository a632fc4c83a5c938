"""Two models and room for one: what a user sees who asks for either, and what is left when something is killed."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
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


async def ask(mesh: MeshProcess, model: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **fields}
    async with aiohttp.ClientSession() as http, http.post(f"{mesh.url}/v1/chat/completions", json=body) as response:
        return response.status, await response.json()


async def processes(mesh: MeshProcess) -> dict[str, dict[str, Any]]:
    """What `weft ps` shows, by model."""
    code, out, error = await run_weft("ps", "-o", "json", home=mesh.home)
    assert code == 0, error
    return {row["model"]: row for row in json.loads(out)["items"]}


async def leases(mesh: MeshProcess) -> list[dict[str, Any]]:
    """Every lease there is."""
    async with aiohttp.ClientSession() as http, http.get(f"{mesh.url}/v1/admin/gpu-memory") as response:
        found = await response.json()
    for host in found["hosts"]:
        for device in host["devices"]:
            assert device["bookedBytes"] <= device["totalBytes"] - device["marginBytes"], "booked twice"
    return [lease for host in found["hosts"] for lease in host["leases"]]


async def test_a_request_for_the_model_that_has_no_room_has_the_idle_one_give_way(tmp_path: Path) -> None:
    with running_mesh(tmp_path / "home", "--config", str(two_models(tmp_path))) as mesh:
        assert [lease["purpose"] for lease in await leases(mesh)] == ["first"]
        assert (await processes(mesh))["first"]["memoryBytes"] == MODEL_MB * MIB
        for model, other in (("second", "first"), ("first", "second")):
            status, answer = await ask(mesh, model)
            assert status == 200, answer
            (lease,) = await leases(mesh)
            assert (lease["purpose"], lease["state"]) == (model, "held")
            states = {name: row["state"] for name, row in (await processes(mesh)).items()}
            assert states == {model: "ready", other: "hibernating"}


async def test_a_pinned_model_does_not_give_way_and_the_other_says_who_holds_the_memory(tmp_path: Path) -> None:
    with running_mesh(tmp_path / "home", "--config", str(two_models(tmp_path))) as mesh:
        code, _, error = await run_weft("load", "first", "--pin", home=mesh.home)
        assert code == 0, error
        loading = asyncio.create_task(run_weft("load", "second", "--watch", home=mesh.home))
        await asyncio.sleep(1.0)
        _, listed, _ = await run_weft("operation", "list", "--unfinished", "-o", "json", home=mesh.home)
        (operation,) = json.loads(listed)["items"]
        assert operation["action"]["model"] == "second"
        assert "first" in operation["detail"], operation
        assert (await run_weft("operation", "cancel", operation["name"], home=mesh.home))[0] == 0
        code, _, shown = await loading
        assert code == 1
        assert "waiting for memory" in shown
        assert "cancelled" in shown
        assert [lease["purpose"] for lease in await leases(mesh)] == ["first"]
        assert (await processes(mesh))["second"]["state"] == "hibernating"


async def test_a_model_is_loaded_with_other_settings_for_this_once(tmp_path: Path) -> None:
    with running_mesh(tmp_path / "home", "--config", str(two_models(tmp_path))) as mesh:
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
        assert (await ask(mesh, "first"))[0] == 200
        assert (await processes(mesh))["first"]["contextTokens"] == 2048


async def test_a_model_that_can_never_fit_is_refused_with_the_figures(tmp_path: Path) -> None:
    runner = fake_runner("box")
    runner["models"][0] |= {"memory_mb": 9000, "start_asleep": True}
    config = write_config(tmp_path, runner, accelerators=BUDGET)
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        code, _, error = await run_weft("load", "m-box", home=mesh.home)
        assert code == 1
        assert "8.8 GiB" in error
        assert await leases(mesh) == []


def test_a_model_that_was_to_be_loaded_and_got_no_memory_is_told_with_the_reason_when_the_mesh_is_up(
    tmp_path: Path,
) -> None:
    runner = fake_runner("box")
    runner["models"][0] |= {"memory_mb": 9000}
    config = write_config(tmp_path, runner, accelerators=BUDGET)
    with running_mesh(tmp_path / "home", "--config", str(config)):
        (line,) = [line for line in (tmp_path / "home.out").read_text().splitlines() if line.startswith("warn m-box")]
    assert "m-box: hibernating on box: m-box needs 8.8 GiB" in line


async def test_keep_alive_of_a_request_unloads_its_model_when_it_is_over(tmp_path: Path) -> None:
    with running_mesh(tmp_path / "home", "--config", str(two_models(tmp_path))) as mesh:
        assert (await ask(mesh, "first", keep_alive="1h"))[0] == 200

        async def is_told() -> bool:
            row = (await processes(mesh))["first"]
            return row["unloadAt"] is not None and row["until"] in ("59m", "1h")

        await eventually(is_told, 10.0, "nobody is told how long it stays")
        assert (await ask(mesh, "first", keep_alive=0))[0] == 200

        async def is_unloaded() -> bool:
            return (await processes(mesh))["first"]["state"] == "hibernating" and not await leases(mesh)

        await eventually(is_unloaded, 10.0, "it stays loaded")
        assert (await ask(mesh, "first", keep_alive="soon"))[0] == 400


async def test_a_runner_killed_with_its_model_gives_the_memory_back_and_loads_again(tmp_path: Path) -> None:
    with running_mesh(tmp_path / "home", "--config", str(two_models(tmp_path))) as mesh:
        (before,) = await leases(mesh)
        os.kill(mesh.facts["pids"]["runners"]["box"], signal.SIGKILL)

        async def has_a_new_lease() -> bool:
            found = await leases(mesh)
            return [lease["purpose"] for lease in found] == ["first"] and found[0]["leaseId"] != before["leaseId"]

        await eventually(has_a_new_lease, 20.0, "the memory does not come back")
        assert (await ask(mesh, "second"))[0] == 200


async def test_what_was_done_is_in_the_audit_and_the_audit_is_whole(tmp_path: Path) -> None:
    with running_mesh(tmp_path / "home", "--config", str(two_models(tmp_path))) as mesh:
        assert (await run_weft("load", "second", "--request-id", "once", home=mesh.home))[0] == 0
        assert (await run_weft("load", "second", "--request-id", "once", home=mesh.home))[0] == 0
        code, _, error = await run_weft("unload", "second", "--request-id", "once", home=mesh.home)
        assert (code, "request_id" in error) == (4, True)
        assert (await run_weft("unload", "second", home=mesh.home))[0] == 0
        _, out, _ = await run_weft("audit", "list", "-o", "json", home=mesh.home)
        events = [entry["event"] for entry in json.loads(out)["items"]]
        assert events.count("operation.accepted") == 2
        assert events.count("operation.succeeded") == 2
        assert (await run_weft("audit", "verify", home=mesh.home))[0] == 0
