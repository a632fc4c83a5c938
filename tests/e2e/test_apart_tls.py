"""Services as processes that listen beyond loopback, over TLS with certificates on both ends."""

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from mesh_process import POOL, eventually, fake_runner, running_mesh, write_config
from tls_mesh import HOST, TlsMesh

from weft_testing.certificates import Authority

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


async def test_mesh_on_all_addresses_requires_keys_over_https_and_rejects_plaintext(tmp_path: Path) -> None:
    ca = Authority()
    files = ca.issue("127.0.0.1").write(tmp_path)
    tls = {"certificate_file": str(files.certificate_file), "key_file": str(files.key_file)}
    config = write_config(
        tmp_path, fake_runner("a"), host="0.0.0.0", gateway={"tls": tls, "allowed_hosts": ["mesh.example"]}
    )
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        assert mesh.url.startswith("https://127.0.0.1:")
        address = mesh.url.removeprefix("https://")
        trusted = ssl.create_default_context(cadata=ca.root.decode())
        async with aiohttp.ClientSession() as http:
            async with http.post(f"https://{address}/v1/chat/completions", json=ANSWER, ssl=trusted) as response:
                assert response.status == 401, await response.text()
            for host, status in (("mesh.example", 401), ("evil.example", 403)):
                named = http.get(f"https://{address}/v1/models", headers={"Host": host}, ssl=trusted)
                async with named as response:
                    assert response.status == status, await response.text()
            with pytest.raises(aiohttp.ClientError):
                await http.post(f"http://{address}/v1/chat/completions", json=ANSWER)
