"""What callers and operators can ask about a request, over real processes."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from mesh_process import POOL, MeshProcess, run_weft

CHAT = "/v1/chat/completions"


@pytest.fixture
def mesh(common_mesh: MeshProcess) -> MeshProcess:
    return common_mesh


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": POOL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, **fields}


async def _request(http: aiohttp.ClientSession, mesh: MeshProcess, request_id: str) -> dict[str, Any]:
    async with http.get(f"{mesh.url}/v1/requests/{request_id}") as response:
        found = await response.json()
        assert isinstance(found, dict)
        return found


async def test_a_request_that_waits_and_is_then_served_can_be_followed_and_explained(mesh: MeshProcess) -> None:
    async with aiohttp.ClientSession() as http, await mesh.backend("a") as backend:
        # The first call to a runner is an rpc of its own, whose cancellation may arrive after the next call.
        assert await _chat(http, mesh, "req-told-before", max_tokens=1) == 200
        await backend.set_behaviour(tokens_per_second=10.0, answer_tokens=0)
        first = asyncio.create_task(_chat(http, mesh, "req-told-first", max_tokens=4000))
        while (await _request(http, mesh, "req-told-first")).get("state") != "running":
            assert not first.done()
        second = asyncio.create_task(_chat(http, mesh, "req-told-second", x_client_id="nightly"))
        while (await _request(http, mesh, "req-told-second")).get("state") != "queued":
            assert not second.done()
        waiting = await _request(http, mesh, "req-told-second")
        assert (waiting["queued"]["position"], waiting["priority"]) == (1, "low")
        listed = (await run_weft("get", "requests", "-o", "name", home=mesh.home))[1]
        assert {"req-told-first", "req-told-second"} <= set(listed.splitlines())
        first.cancel()
        assert await second == 200
        done, left = (
            await _request(http, mesh, "req-told-second"),
            await _request(http, mesh, "req-told-first"),
        )
    assert (left["state"], left["reason"]) == ("ended", "cancelled")
    assert (done["state"], done["receipt"]["outcome"]) == ("ended", "completed")
    assert [decision["kind"] for decision in done["decisions"]] == ["queued", "placed"]
    code, text, _ = await run_weft("explain", "req-told-second", home=mesh.home)
    assert code == 0
    assert "m-a on a: answered" in text
    clients = json.loads((await run_weft("get", "clients", "-o", "json", home=mesh.home))[1])
    assert [(one["clientId"], one["runningCount"]) for one in clients["items"]] == [("nightly", 0)]


async def test_a_tenant_that_asks_too_often_is_told_everything(mesh: MeshProcess) -> None:
    async with aiohttp.ClientSession() as http:
        headers = {"X-Tenant-ID": "small", "X-Request-Id": "req-told-small"}
        answers = [await _answer(http, mesh, headers) for _ in range(3)]
    assert [status for status, _, _ in answers] == [200, 200, 429]
    _, told, body = answers[-1]
    assert body["request_id"] == "req-told-small"
    assert (body["error"]["code"], body["error"]["limit"], body["error"]["remaining"]) == ("rate_limit_exceeded", 2, 0)
    assert 3_000 <= int(told["retry-after"]) <= 3_600
    assert told["x-should-retry"] == "false", "no client waits for an hour"
    code, text, _ = await run_weft("explain", "req-told-small", home=mesh.home)
    assert code == 0
    assert "rate_limit_exceeded" in text


async def _chat(http: aiohttp.ClientSession, mesh: MeshProcess, request_id: str, **fields: Any) -> int:
    async with http.post(f"{mesh.url}{CHAT}", json=_body(**fields), headers={"X-Request-Id": request_id}) as response:
        await response.read()
        return response.status


async def _answer(
    http: aiohttp.ClientSession, mesh: MeshProcess, headers: dict[str, str]
) -> tuple[int, Any, dict[str, Any]]:
    async with http.post(f"{mesh.url}{CHAT}", json=_body(), headers=headers) as response:
        return response.status, response.headers, await response.json()
