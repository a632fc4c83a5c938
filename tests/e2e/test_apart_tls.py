"""Services as processes that listen beyond loopback, over TLS with certificates on both ends."""

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from mesh_process import POOL, eventually
from tls_mesh import HOST, TlsMesh

ANSWER = {"model": POOL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[TlsMesh]:
    running = TlsMesh(tmp_path)
    try:
        running.start_all()
        yield running
    finally:
        codes = running.services.end_all()
    assert set(codes) == {0}


async def ask(mesh: TlsMesh, http: aiohttp.ClientSession) -> dict[str, Any]:
    """One chat over HTTPS, once there is a runner for it."""
    trusted = ssl.create_default_context(cadata=mesh.ca.root.decode())

    async def answer() -> dict[str, Any] | None:
        url = f"{mesh.addresses['gateway']}/v1/chat/completions"
        async with http.post(url, json=ANSWER, ssl=trusted) as response:
            found: dict[str, Any] = await response.json()
            return found if response.status == 200 else None

    found: dict[str, Any] = await eventually(answer, 20.0, "no answer over TLS")
    return found


async def test_services_beyond_loopback_serve_chats_over_tls_and_reload_certificates(mesh: TlsMesh) -> None:
    assert all(mesh.addresses[name].startswith(f"tls:{HOST}:") for name in ("registry", "router", "runner"))
    assert mesh.addresses["gateway"].startswith("https://")
    async with aiohttp.ClientSession() as http:
        assert (await ask(mesh, http))["usage"]["completion_tokens"] == 3
        for service in mesh.addresses:
            mesh.issue(service)
        for _ in range(5):
            assert (await ask(mesh, http))["usage"]["completion_tokens"] == 3
