"""Attached servers that list other models than the configured one."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from aiohttp import web
from kit.engine_settings import engine_settings
from kit.hostile_engine.server import FACTS
from kit.http_server import http_server
from runner_harness import running_runner

from runner_svc.instance.instance_settings import HibernationSettings, ServedModel
from runner_svc.policy.lifecycle import Phase
from runner_svc.runtimes.openai_http.openai_http_backend import AttachedServer
from runner_svc.runtimes.openai_http.runtime import OpenAiHttpModel


@dataclass
class Lister:
    """A server with the models in `names`, which counts other requests than those for facts about itself."""

    names: list[str] = field(default_factory=list)
    other_paths: list[str] = field(default_factory=list)
    lists_sent: int = 0
    url: str = ""

    async def answer(self, request: web.BaseRequest) -> web.Response:
        if request.path == "/v1/models":
            self.lists_sent += 1
            data = [{"id": name, "object": "model", "owned_by": "library"} for name in self.names]
            return web.Response(text=json.dumps({"object": "list", "data": data}))
        if request.path in FACTS:
            return web.Response(status=404)
        self.other_paths.append(request.path)
        return web.Response(status=200)


@asynccontextmanager
async def lister(*names: str) -> AsyncIterator[Lister]:
    found = Lister(list(names))
    async with http_server(found.answer) as url:
        found.url = f"{url}/v1"
        yield found


def served(server: Lister, upstream_model: str) -> ServedModel:
    config = engine_settings(
        OpenAiHttpModel, url=server.url, upstream_model=upstream_model, probe_interval_seconds=0.05, probe_failures=2
    )
    return ServedModel(
        name="m",
        make_backend=lambda: AttachedServer(*config),
        hibernation=HibernationSettings(attached=True, attach_retry_seconds=0.05),
    )


async def test_server_missing_the_model_is_not_ready_and_gets_no_requests_until_it_lists_it(tmp_path: Path) -> None:
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


async def test_models_of_one_server_share_its_probes() -> None:
    """Eight models asked their server eight times per interval."""
    names = [f"m{number}" for number in range(8)]
    async with lister(*names) as server:
        _, context = engine_settings(
            OpenAiHttpModel, url=server.url, upstream_model="m0", probe_interval_seconds=3600.0, probe_failures=2
        )
        models = [OpenAiHttpModel(name=name, url=server.url, upstream_model=name) for name in names]
        backends = [AttachedServer(model, replace(context, where=model.name)) for model in models]
        try:
            await asyncio.gather(*(backend.start() for backend in backends))
            sent = server.lists_sent
            # Each model has read its own facts once; of the probes two at most began after the last model called.
            assert len(names) < sent <= len(names) + 2
            probes = [backend._is_there(backend._running()) for backend in backends]
            assert await asyncio.gather(*probes) == [True] * len(names)
            assert server.lists_sent == sent
            # Another key may see other models.
            other = AttachedServer(replace(models[0], api_key_env="KEY"), replace(context, environment={"KEY": "k"}))
            backends.append(other)
            await other.start()
            assert server.lists_sent == sent + 2
        finally:
            for backend in backends:
                await backend.stop()
