"""A model that finds too little memory: what its callers are told, and when it is tried again."""

import shlex
import time
from pathlib import Path
from typing import Any

import aiohttp
from mesh_process import MeshProcess, eventually, fake_runner, running_mesh, write_config

from weft.api.registry.v1 import runner_pb2

MODEL = "large"
PAUSE_SECONDS = 2.0
WORDS = "ggml_cuda: allocating 9000 MiB on device 0: cudaMalloc failed: out of memory"


async def _ask(http: aiohttp.ClientSession, mesh: MeshProcess) -> tuple[int, dict[str, Any]]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    async with http.post(f"{mesh.url}/v1/chat/completions", json=body) as response:
        return response.status, await response.json()


async def test_too_little_memory_is_told_with_advice_and_a_request_after_the_pause_tries_again(tmp_path: Path) -> None:
    full, starts = tmp_path / "full", tmp_path / "starts"
    runner = fake_runner("box")
    script = (
        f"echo start >> {shlex.quote(str(starts))}; "
        f"if [ -e {shlex.quote(str(full))} ]; then echo '{WORDS}'; exit 1; fi; "
        f'exec {shlex.join(runner["command"])} "$@"'
    )
    runner["command"] = ["/bin/sh", "-c", script, "sh"]
    runner["models"][0] |= {"name": MODEL, "pool": None, "start_asleep": True}
    runner |= {"first_pause_seconds": PAUSE_SECONDS}
    full.touch()
    with running_mesh(tmp_path / "home", "--config", str(write_config(tmp_path, runner))) as mesh:

        async def phase() -> "runner_pb2.InstanceState":
            (known,) = await mesh.runners()
            return known.capability.instances[0]

        async def rests() -> bool:
            return (await phase()).phase == runner_pb2.InstanceState.PHASE_HIBERNATING

        async with aiohttp.ClientSession() as http:

            async def answers() -> bool:
                return (await _ask(http, mesh))[0] == 200

            began = time.monotonic()
            status, answer = await _ask(http, mesh)
            assert status == 503
            assert "fewer slots" in answer["error"]["message"]
            for _ in range(3):
                assert (await _ask(http, mesh))[0] == 503
            tries = starts.read_text().count("start")
            assert tries <= 1 + (time.monotonic() - began) // PAUSE_SECONDS, "it was tried again within its pause"
            full.unlink()
            await eventually(rests, 10.0, "the pause does not end")
            # The router hears of the end of the pause a moment after the registry.
            await eventually(answers, 5.0, "it is not tried again after its pause")
        assert starts.read_text().count("start") == tries + 1
