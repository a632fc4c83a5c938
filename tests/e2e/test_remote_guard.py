"""Nothing leaves the premises unless it may: a whole mesh with a local model and a provider that counts its bytes."""

import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from kit.counting_provider import WORDS, CountingProvider, counting_provider
from mesh_process import WEFT, MeshProcess, eventually, fake_runner, running_mesh, write_config

from weft.client import connect_async
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.free_port import free_ports

KEY_VARIABLE = "FRONTIER_KEY"
KEY = "sk-very-secret-0123456789"
LOCAL, CLOUD, NAMELESS, UNTRUSTED = "m-left", "cloud", "nameless", "untrusted"
ROUTES = f"""\
kind: route
name: careful
candidates: [{LOCAL}, {CLOUD}]
---
kind: route
name: cloudy
candidates: [{CLOUD}, {LOCAL}]
---
kind: route
name: broken
candidates: [{UNTRUSTED}, {LOCAL}]
---
kind: route
name: cloud-only
candidates: [{CLOUD}]
"""
PLAIN_PORT = free_ports(2)
TLS_PORT = PLAIN_PORT + 1


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("remote")
    key = {"api_key_env": KEY_VARIABLE, "slots": 2, "timeout_seconds": 20.0}
    cloud = {
        "name": "away",
        "runtime": "openai_remote",
        "models": [
            {"name": CLOUD, "url": f"http://127.0.0.1:{PLAIN_PORT}/v7", "upstream_model": "frontier", **key},
            {"name": NAMELESS, "url": "https://no-such-host.invalid/v1", **key},
            {"name": UNTRUSTED, "url": f"https://127.0.0.1:{TLS_PORT}/v7", **key},
        ],
        "agents": [{"name": "spokesman", "model": CLOUD}],
    }
    router = {
        "queue_timeout_seconds": 4.0,
        "tenants": {"house": {"allow_remote": "never"}, "cloudy": {"allow_remote": "always"}},
    }
    config = write_config(folder, fake_runner("left"), cloud, router=router)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(KEY_VARIABLE, KEY)
        with running_mesh(folder / "home", "--config", str(config)) as mesh:
            environment.setenv("WEFT_HOME", str(mesh.home))
            subprocess.run([*WEFT, "apply", "-f", "-"], input=ROUTES.encode(), check=True)
            yield mesh


@pytest.fixture
async def provider(mesh: MeshProcess) -> AsyncIterator[CountingProvider]:
    """The provider of `cloud`, with the guard down."""
    await _set_guard(mesh, allows_fallback=True)
    async with counting_provider(port=PLAIN_PORT) as provider:
        yield provider


async def _set_guard(mesh: MeshProcess, *, allows_fallback: bool) -> None:
    config = {"allowCloudFallback": allows_fallback}
    async with aiohttp.ClientSession() as http, http.put(f"{mesh.url}/api/v1/config", json=config) as response:
        assert (response.status, await response.json()) == (200, config)


@dataclass(frozen=True)
class Answer:
    """What a chat came to."""

    status: int
    body: Any
    request_id: str
    retry_after: str | None
    left_premises: str | None
    """The header of an answer."""


async def _ask(mesh: MeshProcess, model: str, *, tenant: str | None = None, **fields: Any) -> Answer:
    body = {"model": model, "messages": [{"role": "user", "content": "Count."}], "max_tokens": 4, **fields}
    headers = {} if tenant is None else {"X-Tenant-ID": tenant}
    url = f"{mesh.url}/v1/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as response:
        return Answer(
            status=response.status,
            body=await response.json(),
            request_id=response.headers["X-Request-Id"],
            left_premises=response.headers.get("X-Left-Premises"),
            retry_after=response.headers.get("Retry-After"),
        )


async def _left_premises(mesh: MeshProcess, answer: Answer) -> bool:
    lines = await eventually(
        lambda: [line for line in mesh.log_lines("request") if line["request_id"] == answer.request_id],
        5.0,
        "the request has no log line",
    )
    return bool(lines[-1]["left_premises"])


def _text(answer: Answer) -> str:
    return str(answer.body["choices"][0]["message"]["content"])


def _untouched(provider: CountingProvider) -> bool:
    return (provider.connection_count, provider.byte_count) == (0, 0)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": CLOUD, "stream": True}),
        ("/v1/chat/completions", {"model": "agent/spokesman"}),
        ("/v1/chat/completions", {"model": "route/cloud-only"}),
        ("/v1/chat/completions", {"model": CLOUD, "allow_remote": False}),
        ("/v1/completions", {"model": CLOUD, "prompt": "Once"}),
        ("/v1/embeddings", {"model": CLOUD, "input": "words"}),
    ],
)
async def test_no_entry_point_sends_a_request_out_without_a_permit(
    mesh: MeshProcess, provider: CountingProvider, path: str, body: dict[str, Any]
) -> None:
    chat = {"messages": [{"role": "user", "content": "Count."}]} if "chat" in path else {}
    async with aiohttp.ClientSession() as http, http.post(f"{mesh.url}{path}", json={**chat, **body}) as response:
        assert response.status in (403, 501), await response.text()
    assert _untouched(provider)


async def test_grpc_requests_need_the_same_permit(mesh: MeshProcess, provider: CountingProvider) -> None:
    async with connect_async(mesh.grpc) as client:
        with pytest.raises(WeftError) as refused:
            assert [piece async for piece in client.chat(CLOUD, "Count.")] == []
        assert refused.value.reason is Reason.PERMISSION_DENIED
        assert _untouched(provider)
        assert [piece async for piece in client.chat(CLOUD, "Count.", allow_remote=True)]
        assert len(provider.requests) == 1


async def test_allow_remote_request_is_answered_and_its_receipt_reports_remote_use(
    mesh: MeshProcess, provider: CountingProvider
) -> None:
    answer = await _ask(mesh, CLOUD, allow_remote=True)
    assert (answer.status, _text(answer)) == (200, "".join(WORDS))
    assert answer.body["usage"]["prompt_tokens"] == 11, "as the provider has counted"
    assert answer.left_premises == "true"
    assert await _left_premises(mesh, answer)
    (request,) = provider.requests
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert request.body["model"] == "frontier"
    assert "allow_remote" not in request.body


async def test_local_only_tenant_stays_local_regardless_of_request_options(
    mesh: MeshProcess, provider: CountingProvider
) -> None:
    refused = await _ask(mesh, CLOUD, tenant="house", allow_remote=True)
    assert (refused.status, refused.body["error"]["code"]) == (403, "permission_denied")
    assert _untouched(provider)
    assert (await _ask(mesh, CLOUD, tenant="cloudy")).status == 200
    assert len(provider.requests) == 1


async def test_route_does_not_fall_back_to_a_remote_provider_when_the_guard_is_on(
    mesh: MeshProcess, provider: CountingProvider
) -> None:
    await _set_guard(mesh, allows_fallback=False)
    async with _broken_local(mesh):
        answer = await _ask(mesh, "route/careful", allow_remote=True)
        assert answer.status >= 400
        assert not await _left_premises(mesh, answer)
        assert _untouched(provider)
        primary = await _ask(mesh, "route/cloudy", allow_remote=True)
        assert primary.status == 200, "an explicit primary is no fallback"
        assert len(provider.requests) == 1
    await _until_local_answers(mesh)


async def test_route_falls_back_to_the_provider_with_the_guard_off_and_a_permit(
    mesh: MeshProcess, provider: CountingProvider
) -> None:
    async with _broken_local(mesh):
        answer = await _ask(mesh, "route/careful", allow_remote=True)
        assert (answer.status, _text(answer)) == (200, "".join(WORDS))
        assert await _left_premises(mesh, answer)
        assert len(provider.requests) == 1
    await _until_local_answers(mesh)


@asynccontextmanager
async def _broken_local(mesh: MeshProcess) -> AsyncIterator[None]:
    """The local model's engine refuses every request before its first token."""
    async with await mesh.backend("left") as backend:
        await backend.set_behaviour(status=500)
    try:
        yield
    finally:
        await mesh.reset("left")


async def _answers(mesh: MeshProcess, model: str) -> bool:
    return (await _ask(mesh, model, allow_remote=True)).status == 200


async def _until_local_answers(mesh: MeshProcess) -> None:
    await eventually(lambda: _answers(mesh, LOCAL), 30.0, "the local model does not come back")
