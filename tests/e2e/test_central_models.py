"""Models of providers that operators declare, with secrets: a whole mesh, and a provider that counts its bytes."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from kit.counting_provider import WORDS, CountingProvider, Reply, counting_provider
from mesh_process import MeshProcess, eventually, run_weft

from weft_testing.free_port import free_port

FIRST, SECOND = "sk-canary-first-0123456789", "sk-canary-second-9876543210"
MODEL, SECRET = "frontier", "provider-key"
SECONDS = 30.0
PORT = free_port()
URL = f"http://127.0.0.1:{PORT}/v7"


@pytest.fixture
def mesh(common_mesh: MeshProcess) -> MeshProcess:
    """A mesh whose file names no provider."""
    return common_mesh


@pytest.fixture
async def provider(mesh: MeshProcess) -> AsyncIterator[CountingProvider]:
    """The provider of MODEL, which is declared with a secret, and deleted with it afterwards."""
    async with counting_provider(port=PORT) as provider:
        await mesh.weft("keys", "secret", "create", SECRET, "-", stdin=FIRST)
        await mesh.weft("models", "create", MODEL, "--url", URL, "--api-key-ref", f"secret/{SECRET}", "--embeddings")
        await eventually(lambda: _is_served(mesh), SECONDS, "the model was not served")
        yield provider
        await mesh.weft("delete", "agent", "clerk", "--ignore-not-found")
        await mesh.weft("delete", "model", MODEL, "--ignore-not-found")
        await mesh.weft("delete", "secret", SECRET, "--ignore-not-found")


async def _refused(mesh: MeshProcess, *arguments: str) -> tuple[int, str]:
    code, _, error = await run_weft(*arguments, home=mesh.home)
    return code, error


async def _chat(mesh: MeshProcess) -> tuple[int, Any, str | None]:
    messages = [{"role": "user", "content": "Count."}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 4, "allow_remote": True}
    async with aiohttp.ClientSession() as http, http.post(f"{mesh.url}/v1/chat/completions", json=body) as response:
        return response.status, await response.json(), response.headers.get("X-Left-Premises")


async def _is_served(mesh: MeshProcess) -> bool:
    return (await _chat(mesh))[0] == 200


async def test_model_is_served_without_a_config_section_and_requests_carry_the_secret(
    mesh: MeshProcess, provider: CountingProvider
) -> None:
    status, body, left = await _chat(mesh)
    assert (status, left) == (200, "true")
    assert body["choices"][0]["message"]["content"] == "".join(WORDS)
    assert provider.requests[-1].headers["authorization"] == f"Bearer {FIRST}"
    assert provider.bodies[-1]["model"] == MODEL
    async with aiohttp.ClientSession() as http, http.get(f"{mesh.url}/v1/models") as response:
        listed = {model["id"]: model["meta"]["remote"] for model in (await response.json())["data"]}
    assert listed[MODEL] is True
    (secret,) = json.loads(await mesh.weft("get", "secrets", "-o", "json"))["items"]
    assert (secret["name"], secret["usedBy"]) == (SECRET, [MODEL])


async def test_declared_price_is_in_quotes_receipts_and_usage(mesh: MeshProcess, provider: CountingProvider) -> None:
    document = {
        "kind": "model",
        "name": MODEL,
        "provider": {"url": URL, "apiKeyRef": f"secret/{SECRET}"},
        "price": {"promptDollars": 2.0, "completionDollars": 10.0},
    }
    await mesh.weft("apply", "-f", "-", stdin=json.dumps(document))

    async def quoted() -> bool:
        found = json.loads(await mesh.weft("models", "quote", MODEL, "Count.", "--allow-remote", "-o", "json"))
        return "priceNanodollars" in found["items"][0]

    await eventually(quoted, SECONDS, "no price is quoted")
    status, body, _ = await _chat(mesh)
    assert (status, provider.bodies[-1]["model"]) == (200, MODEL)
    price = 2_000 * body["usage"]["prompt_tokens"] + 10_000 * body["usage"]["completion_tokens"]
    record = json.loads(await mesh.weft("explain", "-o", "json"))
    assert record["receipt"]["priceNanodollars"] == price
    used = json.loads(await mesh.weft("mesh", "usage", "--by", "model", "--model", MODEL, "-o", "json"))
    assert (used["total"]["priced"], used["total"]["priceNanodollars"], used["comparedWith"]) == (1, price, MODEL)
    assert "COST" in await mesh.weft("mesh", "usage", "--by", "model", "--model", MODEL)


async def test_two_aliases_of_a_model_send_their_own_parameters_and_headers(
    mesh: MeshProcess, provider: CountingProvider
) -> None:
    calm = {
        "kind": "alias",
        "name": "calm",
        "target": MODEL,
        "defaultParams": {"reasoning_effort": "low"},
        "forcedParams": {"temperature": 0.25},
        "providerHeaders": {"x-title": "weft", "x-team-key": f"secret/{SECRET}"},
    }
    wild = {"kind": "alias", "name": "wild", "target": MODEL, "removedParams": ["temperature"]}
    await mesh.weft("apply", "-f", "-", stdin="\n---\n".join(map(json.dumps, (calm, wild))))
    pids = {process.pid for process in mesh.family()}

    async def answered(name: str, **more: Any) -> tuple[Any, Any, Any]:
        messages = [{"role": "user", "content": "Count."}]
        body = {"model": name, "messages": messages, "temperature": 1, "allow_remote": True, **more}
        async with aiohttp.ClientSession() as http, http.post(f"{mesh.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json(), provider.bodies[-1], provider.requests[-1].headers

    async def is_known() -> bool:
        return "warnings" in (await answered("calm"))[0]

    await eventually(is_known, SECONDS, "the preset was not applied")
    body, sent, headers = await answered("calm")
    assert (sent["temperature"], sent["reasoning_effort"]) == (0.25, "low")
    assert (headers["x-title"], headers["x-team-key"]) == ("weft", FIRST)
    assert [each["field"] for each in body["warnings"]] == ["temperature"]
    assert "temperature replaced by alias/calm" in await mesh.weft("explain")
    body, sent, headers = await answered("wild", durable="wait")
    assert "temperature" not in sent
    assert "x-title" not in headers
    assert body["warnings"][0]["message"] == "was removed by alias/wild"
    assert {process.pid for process in mesh.family()} == pids
    shown = await mesh.weft("get", "aliases", "-o", "json") + await mesh.weft("describe", "alias", "calm")
    assert (f"secret/{SECRET}" in shown, FIRST in shown) == (True, False)
    (secret,) = json.loads(await mesh.weft("get", "secrets", "-o", "json"))["items"]
    assert secret["usedBy"] == ["alias/calm", MODEL]
    await mesh.weft("delete", "alias", "calm", "wild")


async def _under_load(mesh: MeshProcess, change: Callable[[], Awaitable[object]]) -> list[int]:
    """The statuses of requests that four callers send one after the other, before, during and after `change`."""
    statuses: list[int] = []
    over = asyncio.Event()

    async def call() -> None:
        while not over.is_set():
            statuses.append((await _chat(mesh))[0])

    callers = [asyncio.create_task(call()) for _ in range(4)]
    await eventually(lambda: len(statuses) > 8, SECONDS, "no request was answered")
    await change()
    so_far = len(statuses)
    await eventually(lambda: len(statuses) > so_far + 12, SECONDS, "no request was answered after the change")
    over.set()
    await asyncio.gather(*callers)
    return statuses


async def test_rotating_a_secret_under_load_fails_no_request_and_restarts_nothing(
    mesh: MeshProcess, provider: CountingProvider
) -> None:
    before = {process.pid for process in mesh.family()}
    statuses = await _under_load(mesh, lambda: mesh.weft("keys", "secret", "rotate", SECRET, "-", stdin=SECOND))
    assert set(statuses) == {200}
    sent = [request.headers["authorization"].removeprefix("Bearer ") for request in provider.requests]
    assert set(sent) == {FIRST, SECOND}
    assert sent == sorted(sent, key=(FIRST, SECOND).index), "after the first request with the new key none has the old"
    assert {process.pid for process in mesh.family()} == before


async def test_rejected_keys_and_missing_secrets_are_operator_errors(
    mesh: MeshProcess, provider: CountingProvider
) -> None:
    quoting = json.dumps(
        {"error": {"message": f"not accept this key {FIRST}", "type": "invalid_request_error"}}
    ).encode()
    provider.replies.append(Reply(status=401, headers={"Content-Type": "application/json"}, body=quoting))
    status, body, _ = await _chat(mesh)
    assert status == 502
    assert FIRST not in str(body)
    code, error = await _refused(mesh, "delete", "secret", SECRET)
    assert (code, f"in use by: {MODEL}" in error) == (4, True)
    await mesh.weft("delete", "secret", SECRET, "--force")
    sent = provider.byte_count
    status, body, _ = await eventually(lambda: _failed(mesh), SECONDS, "the model still had its key")
    assert (status, f"secret/{SECRET}" in str(body)) == (502, True)
    assert provider.byte_count >= sent


async def _failed(mesh: MeshProcess) -> Any:
    found = await _chat(mesh)
    return found if found[0] != 200 else None
