"""Two engines that report their caches: the router places prompts by these reports, and explains it."""

import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kit.block_publisher import BlockPublisher, publisher, removed, stored
from mesh_process import POOL, MeshProcess, eventually, running_mesh, write_config

from runner_svc.runtimes.kv_events import FLAG
from weft_testing.fake_backend.process import fake_backend_command

pytestmark = pytest.mark.slow("starts a mesh")
STORY = "A long story about a fox and a crow. " * 400
NOTICE_SECONDS = 20.0


def _runner(name: str, folder: Path) -> dict[str, Any]:
    model = {"name": f"m-{name}", "pool": POOL, "model": str(folder), "slots": 4, "context_tokens": 16_384}
    return {
        "name": name,
        "runtime": "vllm",
        "command": fake_backend_command(),
        "models": [{**model, "kv_events": True}],
    }


async def _chat(mesh: MeshProcess, text: str, tenant: str = "default") -> tuple[str, str, bool]:
    """Sends a request; returns its id, the model that answered, and whether the prompt was reported as cached there."""
    body = {"model": POOL, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    async with (
        aiohttp.ClientSession(mesh.url, headers={"X-Tenant-ID": tenant}) as session,
        session.post("/v1/chat/completions", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
        request_id = answer.headers["X-Request-Id"]
    out = await mesh.weft("explain", request_id)
    (model,) = re.findall(r"attempt 1 sent to (\S+) on", out)
    return request_id, model, "(reported)" in next(line for line in out.splitlines() if "* " in line)


async def _until_reporting(mesh: MeshProcess) -> None:
    async def reports() -> bool:
        runners = await mesh.runners()
        return all(state.reports_prefixes for known in runners for state in known.capability.instances)

    await eventually(reports, NOTICE_SECONDS, "the engines do not report")


async def test_prompt_follows_the_reports_of_the_engines(tmp_path: Path) -> None:
    config = write_config(tmp_path, *(_runner(name, tmp_path) for name in ("a", "b")))
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        async with AsyncExitStack() as stack:
            engines: dict[str, BlockPublisher] = {}
            for line in [each.cmdline() for each in mesh.family()]:
                if FLAG in line and "serve" in line:
                    name = line[line.index("--served-model-name") + 1]
                    engines[name] = await stack.enter_async_context(publisher(line))
                    await engines[name].publish(stored(b"x", session="x"))
            assert sorted(engines) == ["m-a", "m-b"]
            await _until_reporting(mesh)
            request, home, _ = await _chat(mesh, STORY)
            await engines[home].publish(stored(*range(100), session=request))

            async def is_reported() -> bool:
                _, model, reported = await _chat(mesh, f"{STORY}More?")
                return model == home and reported

            await eventually(is_reported, NOTICE_SECONDS, "the report did not reach the router")
            assert not (await _chat(mesh, STORY, "stranger"))[2], "another tenant's prompt counts"
            await engines[home].publish(removed(0))

            async def is_lost() -> bool:
                return not (await _chat(mesh, f"{STORY}Again?"))[2]

            await eventually(is_lost, NOTICE_SECONDS, "the loss did not reach the router")
