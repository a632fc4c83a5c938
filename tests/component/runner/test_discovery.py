"""Engines that run on this machine are found and told apart by their own endpoints, whatever else answers there."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from kit.http_server import http_server

from runner_svc.discovery import FoundServer, find_servers
from runner_svc.openai_upstream import probe
from weft_testing.free_port import free_port

SECONDS = 1.0
HANGS = object()
"""An answer that does not come."""


def listing(*names: str, owner: str) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": name, "owned_by": owner} for name in names]}


@asynccontextmanager
async def serving(routes: Mapping[str, Any], status: int = 200) -> AsyncIterator[str]:

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        found = routes.get(request.path)
        if found is HANGS:
            await asyncio.Event().wait()
        if found is None:
            return web.Response(status=404)
        return web.Response(status=status, body=found if isinstance(found, bytes) else json.dumps(found).encode())

    async with http_server(answer) as url:
        yield url.removeprefix("http://")


async def found_at(address: str) -> FoundServer | None:
    found = await find_servers((address,), SECONDS)
    return found[0] if found else None


ENGINES = {
    "Ollama 0.12.3": {"/v1/models": listing("llama3.2:3b", owner="library"), "/api/version": {"version": "0.12.3"}},
    "LM Studio": {
        "/v1/models": listing("qwen3-8b", owner="organization_owner"),
        "/api/v0/models": {"object": "list", "data": [{"id": "qwen3-8b", "type": "llm"}]},
    },
    "llama.cpp b6000-abc": {"/v1/models": listing("smol", owner="llamacpp"), "/props": {"build_info": "b6000-abc"}},
    "vLLM 0.33.0": {"/v1/models": listing("Qwen/Qwen3", owner="vllm"), "/version": {"version": "0.33.0"}},
    "SGLang": {"/v1/models": listing("Qwen/Qwen3", owner="sglang"), "/get_model_info": {"model_path": "x"}},
    "OpenAI-compatible server": {"/v1/models": listing("a", owner="somebody")},
}


@pytest.mark.parametrize("title", ENGINES)
async def test_engine_is_identified_by_its_endpoints(title: str) -> None:
    async with serving(ENGINES[title]) as address:
        found = await found_at(address)
    assert found is not None
    assert (found.title, found.url, len(found.models), found.why_empty) == (title, f"http://{address}", 1, "")


async def test_ollama_without_models_is_found() -> None:
    routes = {"/v1/models": {"object": "list", "data": None}, "/api/version": {"version": "0.12.3"}}
    async with serving(routes) as address:
        found = await found_at(address)
    assert found is not None
    assert (found.program, found.models, found.why_empty) == ("ollama", (), "")


@pytest.mark.parametrize("models", [("smol",), ()])
async def test_weft_mesh_is_not_an_engine(models: tuple[str, ...]) -> None:
    routes = {"/v1/models": listing(*models, owner="weft"), "/api/version": {"version": "0.12.3", "server": "weft"}}
    async with serving(routes) as address:
        assert await found_at(address) is None


async def test_server_that_requires_a_key_is_listed_and_not_served() -> None:
    async with serving({"/v1/models": {}}, status=401) as address:
        found = await found_at(address)
    assert found is not None
    assert "it requires an API key" in found.why_empty


@pytest.mark.parametrize(
    "routes",
    [
        {},
        {"/v1/models": b"<html>hello</html>"},
        {"/v1/models": b"[" * 100_000},
        {"/v1/models": {"data": "yes"}, "/api/version": b"\xff\xfe"},
        pytest.param({"/v1/models": HANGS}, marks=pytest.mark.slow("waits for a server that hangs")),
    ],
)
async def test_servers_that_are_no_engine_are_not_found(routes: dict[str, Any]) -> None:
    async with serving(routes) as address:
        assert await found_at(address) is None


async def test_server_with_hostile_names_is_sanitized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MAX_ANSWER_BYTES", 1024**2)
    names = ["\x1b[2J", "a" * 100_000, *(f"m{number}" for number in range(5_000))]
    routes = {"/v1/models": listing(*names, owner="library"), "/api/version": {"version": "\x1b[31m9" * 200}}
    async with serving(routes) as address:
        found = await found_at(address)
    assert found is not None
    assert found.version.isprintable()
    assert len(found.version) <= 64
    assert len(found.models) <= 2_000


@pytest.mark.slow("waits for servers that hang")
async def test_hanging_server_does_not_delay_discovery() -> None:
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(serving({"/v1/models": HANGS})) for _ in range(5)]
        ollama = await stack.enter_async_context(serving(ENGINES["Ollama 0.12.3"]))
        found = await find_servers((*silent, ollama), SECONDS)
    assert [each.program for each in found] == ["ollama"]
    # All are asked at once: the time of one, and not of six.
    assert time.monotonic() - began < 4 * SECONDS


async def test_closed_port_yields_nothing() -> None:
    assert await find_servers((f"127.0.0.1:{free_port()}", "not.a.host.invalid:1"), SECONDS) == []
