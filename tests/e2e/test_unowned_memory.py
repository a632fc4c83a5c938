"""Memory whose owner is gone: a model that is deleted while it is loaded, a runner that is frozen with its lease."""

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
from mesh_process import eventually, fake_runner, run_weft, running_mesh, write_config
from test_memory_swap import BUDGET, MODEL_MB, ask, leases, processes, two_models

ANSWER_LIMIT_SECONDS = 90.0


async def test_a_loaded_model_is_not_deleted_and_a_forced_delete_gives_its_memory_to_the_next(tmp_path: Path) -> None:
    with running_mesh(tmp_path / "home", "--config", str(two_models(tmp_path))) as mesh:
        code, out, error = await run_weft("delete", "model", "first", home=mesh.home)
        assert (code, out) == (4, "")
        for word in ("box", "weft unload first", "weft.yaml", "--force"):
            assert word in error
        async with aiohttp.ClientSession() as http, http.delete(f"{mesh.url}/api/v1/models/first") as response:
            assert response.status == 409
        assert (await processes(mesh))["first"]["state"] == "ready"
        code, out, error = await run_weft("delete", "model", "first", "--force", home=mesh.home)
        assert (code, out) == (0, "model/first deleted\n"), error
        assert "model/first comes back when box is started again (weft restart)" in error
        assert [lease["state"] for lease in await leases(mesh)] in ([], ["releasing"])
        status, answer = await ask(mesh, "second")
        assert status == 200, answer
        assert (await ask(mesh, "first"))[0] == 404
        code, _, error = await run_weft("unload", "first", home=mesh.home)
        assert (code, "there is no model or pool first;" in error) == (3, True), error


async def test_a_request_behind_memory_that_nobody_gives_back_ends_with_the_queue_timeout(tmp_path: Path) -> None:
    """It had waited in vain for as long as a load may take, and for the next load, and so on."""
    holder, other = fake_runner("holder", pool="ph"), fake_runner("other", pool="po")
    for runner in (holder, other):
        runner["models"][0] |= {"memory_mb": MODEL_MB, "start_asleep": runner is other}
    config = write_config(
        tmp_path,
        holder,
        other,
        accelerators=BUDGET,
        registry={
            "restart_grace_seconds": 1.0,
            "ledger": {"lease_time_to_live_seconds": 3.0, "renew_interval_seconds": 1.0},
        },
        router={"queue_timeout_seconds": 3.0},
    )
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        frozen = mesh.facts["pids"]["runners"]["holder"]
        os.kill(frozen, signal.SIGSTOP)
        try:

            async def is_unowned() -> bool:
                _, listed, _ = await run_weft("lease", "list", home=mesh.home)
                return "orphaned, unowned" in listed

            await eventually(is_unowned, 120.0, "the lease is never said to have no owner")
            _, findings, _ = await run_weft("doctor", home=mesh.home)
            assert "held without an owner: 2.0 GiB on" in findings, findings
            async with asyncio.timeout(ANSWER_LIMIT_SECONDS):
                status, answer = await ask(mesh, "m-other")
        finally:
            os.kill(frozen, signal.SIGCONT)
        assert (status, answer["error"]["code"]) == (503, "queue_timeout"), answer
        assert "m-holder (no heartbeat)" in answer["error"]["message"]
