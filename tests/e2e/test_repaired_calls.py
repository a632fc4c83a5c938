"""Calls of the real demo model that reach the mesh broken: they are served repaired or made again."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from mesh_process import START_SECONDS, MeshProcess, eventually, run_weft, running_mesh, write_config

from weft_app.compose.demo import demo_model_path

pytestmark = [pytest.mark.slow("a mesh with a real engine"), pytest.mark.real]

SCHEMA = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["days"],
}
FUNCTION = {"type": "function", "function": {"name": "forecast", "description": "The weather.", "parameters": SCHEMA}}
BREAKS = {"quotes": lambda text: text.replace('"', "'"), "cut": lambda text: text[: text.index(":")] + ': "'}


@asynccontextmanager
async def breaking_server(upstream: list[str]) -> AsyncGenerator[str]:
    """A server that makes calls by the model at `upstream`, and breaks them unless the tool is forced by name."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "real", "object": "model", "owned_by": "x"}]})

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        said = str(body["messages"][-1]["content"])
        is_forced = isinstance(body.get("tool_choice"), dict)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        url = f"{upstream[0]}/v1/chat/completions"
        schema = body["tools"][0]["function"]["parameters"]
        form = {"type": "json_schema", "json_schema": {"name": "arguments", "schema": schema}}
        asked = {"model": "real", "messages": body["messages"], "response_format": form}
        async with aiohttp.ClientSession() as session, session.post(url, json=asked) as found:
            text = (await found.json())["choices"][0]["message"]["content"]
        text = text if is_forced else BREAKS[said](text)
        deltas: list[Any] = [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "forecast"}}]
        deltas += [{"index": 0, "function": {"arguments": text[at : at + 4]}} for at in range(0, len(text), 4)]
        for delta in deltas:
            await answer.write(chunk({"tool_calls": [delta]}))
        await answer.write(chunk({}, "tool_calls"))
        usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
        await answer.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
        return answer

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    document = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "real", "choices": [choice]}
    return b"data: " + json.dumps(document).encode() + b"\n\n"


async def serves(mesh: MeshProcess, model: str) -> bool:
    async with aiohttp.ClientSession() as session, session.get(f"{mesh.url}/v1/models/{model}") as got:
        return got.status == 200 and (await got.json())["meta"]["status"] == "active"


async def ask(mesh: MeshProcess, how: str) -> tuple[dict[str, Any], str]:
    """The arguments of the call as its caller gets them, and the id of the request."""
    messages = [{"role": "user", "content": how}]
    body = {"model": "box", "messages": messages, "tools": [FUNCTION], "tool_choice": "required", "stream": True}
    async with aiohttp.ClientSession() as session, session.post(f"{mesh.url}/v1/chat/completions", json=body) as got:
        text = await got.text()
        assert got.status == 200, text
        request_id = got.headers["X-Request-Id"]
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls") or []]
    return json.loads("".join(call["function"].get("arguments") or "" for call in calls)), request_id


async def test_broken_calls_of_a_real_model_are_served_as_valid_ones(tmp_path: Path) -> None:
    upstream: list[str] = []
    async with breaking_server(upstream) as url:
        real = {"name": "real", "path": str(demo_model_path()), "slots": 1}
        local = {"name": "local", "models": [real | {"context_tokens": 2048, "default_max_tokens": 64}]}
        box = {"name": "proxy", "url": url, "models": [{"name": "box", "upstream_model": "real"}]}
        config = write_config(tmp_path, local, box)
        with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
            upstream.append(mesh.url)
            # The server does not answer while the mesh starts, which blocks this event loop.
            await eventually(partial(serves, mesh, "box"), START_SECONDS, "the mesh has not found the server")
            for how, told in (("quotes", "1 repaired"), ("cut", "1 made again")):
                arguments, request_id = await ask(mesh, how)
                assert isinstance(arguments["days"], int), (how, arguments)
                _, shown, _ = await run_weft("explain", request_id, home=mesh.home)
                assert told in shown, (how, shown)
