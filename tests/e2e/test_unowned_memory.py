"""Memory whose owner is gone: a runner that is frozen with its lease."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from mesh_process import eventually, fake_runner, run_weft, running_mesh, write_config
from test_memory_swap import BUDGET, MODEL_MB, ask

ANSWER_LIMIT_SECONDS = 90.0


@pytest.mark.nightly("waits for memory that is not given back")
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
