"""The environment of an engine's program, without the keys of the mesh."""

import asyncio
import os
import sys

from runner_svc.backend.engine_process import ProcessBackend
from runner_svc.policy.timeouts import StopGraces
from weft.client._home import KEY_VARIABLE
from weft_app.cli.runner import TOKEN_VARIABLE
from weft_app.compose.security import SERVICE_KEY_VARIABLE

PROGRAM = "import os, time; print('HEARD', *sorted(os.environ), flush=True); time.sleep(60)"


async def test_engine_environment_excludes_mesh_keys() -> None:
    heard: asyncio.Queue[list[str]] = asyncio.Queue()

    def hear(lines: list[str]) -> None:
        for line in lines:
            if line.startswith("HEARD"):
                heard.put_nowait(line.split())

    ours = {SERVICE_KEY_VARIABLE, KEY_VARIABLE, TOKEN_VARIABLE}
    engine = ProcessBackend(StopGraces(first_term_seconds=0.1))  # type: ignore[abstract]  # its process alone
    environment = {**os.environ, **dict.fromkeys(ours, "weft_secret"), "CUDA_VISIBLE_DEVICES": "0"}
    await engine.start_process([sys.executable, "-c", PROGRAM], environment, hear)
    try:
        async with asyncio.timeout(20):
            names = set(await heard.get())
    finally:
        await engine.stop()
    assert "CUDA_VISIBLE_DEVICES" in names
    assert names & ours == set()
