"""A router that is killed or frozen: deadlines are kept by the gateway, and its health says that there is no router."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from apart_mesh import Apart, running_apart
from mesh_process import POOL, eventually, fake_runner, write_config

DEADLINE = {"X-Request-Timeout-Seconds": "1"}
CHAT: dict[str, Any] = {"model": POOL, "messages": [{"role": "user", "content": "hi"}]}
OPERATIONS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT | {"max_tokens": 5},
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses": {"model": POOL, "input": "hi", "store": False},
    "/v1/completions": {"model": POOL, "prompt": "hi"},
    "/v1/embeddings": {"model": POOL, "input": "hi"},
    "/v1/rerank": {"model": POOL, "query": "hi", "documents": ["a", "b"]},
    "/v1/tokenize": {"model": POOL, "content": "hi"},
    "/v1/images/generations": {"model": POOL, "prompt": "hi"},
    "/v1/audio/speech": {"model": POOL, "input": "hi", "voice": "alloy"},
}
STREAMED = ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions")


@contextmanager
def killed(mesh: Apart) -> Iterator[None]:
    mesh.end("router", signal.SIGKILL)
    try:
        yield
    finally:
        mesh.start("router")


@contextmanager
def frozen(mesh: Apart) -> Iterator[None]:
    router = mesh._processes["router"]
    router.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        router.send_signal(signal.SIGCONT)


@asynccontextmanager
async def caller(mesh: Apart) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(mesh.url) as http:
        await until_health(http, 200, "ok")
        yield http


async def until_health(http: aiohttp.ClientSession, status: int, word: str) -> None:
    async def is_so() -> bool:
        async with http.get("/health") as response:
            return (response.status, (await response.json())["status"]) == (status, word)

    await eventually(is_so, 30.0, f"/health never says {word}")


async def late(http: aiohttp.ClientSession, path: str, *, stream: bool) -> tuple[int, str, str]:
    """Status, error code and message of a request that nobody places before its deadline."""
    body = OPERATIONS[path] | ({"stream": True} if stream else {})
    headers = DEADLINE | {"X-Request-Id": f"late-{path.replace('/', '-')}-{stream}"}
    async with http.post(path, json=body, headers=headers) as response:
        text = await response.text()
    if response.content_type == "text/event-stream":
        # It was kept alive before: then its last event is the error.
        last = json.loads([line for line in text.splitlines() if line.startswith("data:")][-1][5:])
        error = last.get("error") or last["response"]["error"]
        return 504, error.get("code", ""), error["message"]
    error = json.loads(text)["error"]
    return response.status, error.get("code", ""), error["message"]


@pytest.mark.parametrize("lost", [killed, pytest.param(frozen, marks=pytest.mark.nightly("another loss of a router"))])
async def test_gateway_enforces_the_deadline_when_the_router_is_lost(tmp_path: Path, lost: Any) -> None:
    """It was answered five seconds late, the log said that the caller had cancelled, and the health was fine."""
    with running_apart(tmp_path, write_config(tmp_path, fake_runner("a"))) as mesh:
        async with caller(mesh) as http:
            with lost(mesh):
                asked = [(path, False) for path in OPERATIONS] + [(path, True) for path in STREAMED]
                answers = await asyncio.gather(*(late(http, path, stream=stream) for path, stream in asked))
                for (path, _), (status, code, message) in zip(asked, answers, strict=True):
                    assert status == 504, (path, message)
                    assert code in ("deadline_exceeded", ""), path
                    assert "passed while it waited" in message, path
                await until_health(http, 503, "no_router")
            await until_health(http, 200, "ok")
            async with http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 3}) as response:
                assert response.status == 200, await response.text()
    lines = [json.loads(line) for line in (mesh.home / "logs" / "gateway.log").read_text().splitlines()]
    reasons = {line["request_id"]: line["reason"] for line in lines if line["event"] == "request"}
    told = {name: reason for name, reason in reasons.items() if name.startswith("late-")}
    assert (len(told), set(told.values())) == (len(asked), {"deadline_exceeded"})
