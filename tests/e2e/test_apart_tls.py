"""Services as processes that listen beyond loopback, over TLS with certificates on both ends."""

import asyncio
import json
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from apart_mesh import Apart
from mesh_process import POOL, WEFT, eventually, fake_runner, run_weft, running_mesh, user_environment, write_config

from weft.client.resources import Registry
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors import WeftError
from weft_testing.certificates import Authority

HOST = "127.0.0.2"
"""An address of this machine that nobody else has; 0.0.0.0 is listened on, and TLS asked for."""
EVERYWHERE = "0.0.0.0:0"
ANSWER = {"model": POOL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


class TlsMesh:
    """Registry, router, runner and gateway, each with a certificate of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = Authority()
        self.services = Apart(folder / "home", folder / "weft.yaml")
        self.addresses: dict[str, str] = {}

    def start_all(self) -> None:
        write_config(self.folder)
        self._start("registry", "--listen", EVERYWHERE)
        self._start("router", "--listen", f"tls:{HOST}:0", "--registry", self.addresses["registry"])
        self._start("runner", "--listen", EVERYWHERE, "--registry", self.addresses["registry"])
        places = ("--registry", self.addresses["registry"], "--router", self.addresses["router"])
        self._start("gateway", *places)

    def issue(self, service: str) -> dict[str, str]:
        """A certificate for a service, new or in place of its old one; its section of the configuration."""
        place = self.folder / service
        place.mkdir(exist_ok=True)
        files = self.ca.issue(HOST, "127.0.0.1", f"weft://mesh/{service}").write(place, self.ca)
        return {
            "certificate_file": str(files.certificate_file),
            "key_file": str(files.key_file),
            "ca_file": str(files.ca_file),
        }

    def environment(self, service: str) -> dict[str, str]:
        """For a command that shows the certificate of a service."""
        files = self.issue(service)
        return {f"WEFT_{name.upper()}": path for name, path in files.items()}

    def _start(self, service: str, *arguments: str) -> None:
        files = self.issue(service)
        edge = {key: files[key] for key in ("certificate_file", "key_file")} if service == "gateway" else {}
        everyone = ["weft://mesh/*"]
        sections: dict[str, Any] = {
            "tls": {
                **files,
                "announced_host": HOST,
                "reload_interval_seconds": 0.01,
                "allowed_clients": {"registry": everyone, "router": everyone, "runner": ["weft://mesh/[rg]*"]},
            },
            "gateway": {"tls": edge},
        }
        config = write_config(self.folder / service, fake_runner("a", answer_tokens=3), **sections)
        self.addresses[service] = self.services.start(service, "--config", str(config), *arguments)


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


async def test_services_beyond_loopback_answer_a_chat_over_tls_and_go_on_with_new_certificates(mesh: TlsMesh) -> None:
    assert all(mesh.addresses[name].startswith(f"tls:{HOST}:") for name in ("registry", "router", "runner"))
    assert mesh.addresses["gateway"].startswith("https://")
    async with aiohttp.ClientSession() as http:
        assert (await ask(mesh, http))["usage"]["completion_tokens"] == 3
        for service in mesh.addresses:
            mesh.issue(service)
        for _ in range(5):
            assert (await ask(mesh, http))["usage"]["completion_tokens"] == 3


async def test_the_command_line_reaches_such_a_mesh_with_a_certificate_and_not_without(mesh: TlsMesh) -> None:
    places = {"WEFT_REGISTRY": mesh.addresses["registry"], "WEFT_ROUTER": mesh.addresses["router"]}
    code, _, error = await weft("get", "runners", "-o", "json", **places)
    assert code == 1
    assert "certificate is not from a trusted authority" in error

    certificate = mesh.environment("operator")
    code, out, error = await weft("get", "runners", "-o", "json", **places, **certificate)
    assert code == 0, error
    (runner,) = json.loads(out)["items"]
    assert runner["status"]["address"] == mesh.addresses["runner"]


def test_a_plaintext_caller_gets_nothing_from_such_a_mesh(mesh: TlsMesh) -> None:
    """The control: a service that served plaintext after all would answer here."""
    plain = mesh.addresses["registry"].removeprefix("tls:")
    with Registry(plain) as registry, pytest.raises(WeftError, match="it may ask for TLS"):
        registry.documents(ResourceKind.RUNNER)


async def weft(*arguments: str, **variables: str) -> tuple[int, str, str]:
    """A command of somebody who has chosen no home."""
    environment = {name: value for name, value in user_environment().items() if name != "WEFT_HOME"}
    process = await asyncio.create_subprocess_exec(
        *WEFT,
        *arguments,
        env={**environment, "COLUMNS": "200", **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    async with asyncio.timeout(60.0):
        out, error = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), error.decode()


@pytest.mark.parametrize(
    ("sections", "missing"),
    [
        ({}, ("gateway.tls.certificate_file",)),
        ({"auth": {"required": True}}, ("gateway.tls.certificate_file",)),
        ({"auth": {"required": False}}, ("auth.required", "gateway.tls.certificate_file")),
        ({"auth": {"required": False}, "gateway": {"tls_terminated_elsewhere": True}}, ("auth.required",)),
    ],
)
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_a_mesh_that_anybody_could_reach_does_not_start(
    tmp_path: Path, host: str, sections: dict[str, Any], missing: tuple[str, ...]
) -> None:
    config = write_config(tmp_path, fake_runner("a"), host=host, **sections)
    code, out, error = await run_weft("up", "--config", str(config), home=tmp_path / "home")
    assert (code, "weft is up" in out) == (2, False)
    assert f"'{host}' is not a loopback address" in error
    assert all(setting in error for setting in missing)


@pytest.mark.parametrize("service", ["registry", "router", "runner"])
async def test_a_service_that_anybody_could_reach_does_not_start(tmp_path: Path, service: str) -> None:
    config = write_config(tmp_path, fake_runner("a"))
    arguments = ("serve", service, "--listen", "0.0.0.0:0", "--config", str(config))
    code, out, error = await run_weft(*arguments, home=tmp_path / "home")
    assert (code, out) == (2, "")
    assert "tls.certificate_file" in error


async def test_a_mesh_on_all_addresses_asks_for_keys_over_https_and_speaks_no_plaintext(tmp_path: Path) -> None:
    ca = Authority()
    files = ca.issue("127.0.0.1").write(tmp_path)
    tls = {"certificate_file": str(files.certificate_file), "key_file": str(files.key_file)}
    config = write_config(
        tmp_path, fake_runner("a"), host="0.0.0.0", gateway={"tls": tls, "allowed_hosts": ["mesh.example"]}
    )
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        assert mesh.url.startswith("https://0.0.0.0:")
        address = mesh.url.removeprefix("https://").replace("0.0.0.0", "127.0.0.1")
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
