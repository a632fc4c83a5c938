"""Attached servers that list other models than the configured one."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web
from kit.engine_settings import engine_settings
from runner_harness import running_runner

from runner_svc.instance.settings import HibernationSettings, ServedModel
from runner_svc.policy.lifecycle import Phase
from runner_svc.runtimes.openai_http.backend import AttachedServer
from runner_svc.runtimes.openai_http.settings import OpenAiHttpModel
from weft_testing.free_port import free_port
from weft_testing.hostile_engine.server import FACTS


@dataclass
class Lister:
    """A server with the models in `names`, which counts other requests than those for facts about itself."""

    names: list[str] = field(default_factory=list)
    status: int = 200
    other_paths: list[str] = field(default_factory=list)
    url: str = ""

    async def answer(self, request: web.BaseRequest) -> web.Response:
        if request.path == "/v1/models":
            data = [{"id": name, "object": "model", "owned_by": "library"} for name in self.names]
            return web.Response(status=self.status, text=json.dumps({"object": "list", "data": data}))
        if request.path in FACTS:
            return web.Response(status=404)
        self.other_paths.append(request.path)
        return web.Response(status=200)


@asynccontextmanager
async def lister(*names: str, status: int = 200) -> AsyncIterator[Lister]:
    found, port = Lister(list(names), status), free_port()
    runner = web.ServerRunner(web.Server(found.answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    found.url = f"http://127.0.0.1:{port}/v1"
    try:
        yield found
    finally:
        await runner.cleanup()


def served(server: Lister, upstream_model: str) -> ServedModel:
    config = engine_settings(
        OpenAiHttpModel, url=server.url, upstream_model=upstream_model, probe_interval_seconds=0.05, probe_failures=2
    )
    return ServedModel(
        name="m",
        make_backend=lambda: AttachedServer(*config),
        hibernation=HibernationSettings(attached=True, attach_retry_seconds=0.05),
    )


async def test_a_server_that_lists_other_models_only_is_not_ready_and_is_asked_for_nothing_until_it_has_the_model(
    tmp_path: Path,
) -> None:
    """A misspelt upstream_model was ready, and the first chat was answered with the server's 404."""
    async with (
        lister("qwen3:8b", "llama3.2:3b") as server,
        running_runner(tmp_path, [served(server, "llama3.2")]) as runner,
    ):
        state = await runner.until(Phase.FAILED)
        assert state.detail == ("the server has no model llama3.2; it has llama3.2:3b, qwen3:8b (set upstream_model)")
        server.names.append("llama3.2:latest")
        await runner.until(Phase.READY)
        server.names.remove("llama3.2:latest")
        state = await runner.until(Phase.FAILED)
        assert "the server has no model llama3.2" in state.detail
        assert server.other_paths == []


@pytest.mark.parametrize("status", [200, 404])
async def test_a_server_that_lists_nothing_or_has_no_list_is_used_as_before(tmp_path: Path, status: int) -> None:
    async with lister(status=status) as server, running_runner(tmp_path, [served(server, "anything")]) as runner:
        await runner.until(Phase.READY)
