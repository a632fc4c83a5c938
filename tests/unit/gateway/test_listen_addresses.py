"""The addresses at which a server listens: all of its host's name, each protected."""

import asyncio
import socket
from typing import Any

import pytest
from kit.failures import fails

from gateway.gateway_config import Exposure
from gateway.http.server import free_address
from weft.kernel.errors.reasons import Reason

LACKING = (socket.AF_INET, "198.51.100.7")
"""An address of documentation, which this machine does not have."""
LOOPBACK = (socket.AF_INET, "127.0.0.1")
OTHER_LOOPBACK = (socket.AF_INET, "127.0.0.2")


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that were listened at."""
    found: list[str] = []
    listen = socket.socket.listen

    def noted(self: socket.socket, *size: int) -> None:
        found.append(self.getsockname()[0])
        listen(self, *size)

    monkeypatch.setattr(socket.socket, "listen", noted)
    return found


def resolve(monkeypatch: pytest.MonkeyPatch, *addresses: tuple[socket.AddressFamily, str]) -> None:
    async def getaddrinfo(_loop: Any, _host: str, port: int, **_: Any) -> list[Any]:
        return [(family, socket.SOCK_STREAM, 6, "", (address, port)) for family, address in addresses]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)


async def test_server_listens_at_each_address_of_its_hosts_name(
    monkeypatch: pytest.MonkeyPatch, bound: list[str]
) -> None:
    """Callers of `localhost` may use another address than the first one."""
    resolve(monkeypatch, LOOPBACK, OTHER_LOOPBACK, LOOPBACK)
    assert await free_address(Exposure(host="box", port=0), "--port") == ("127.0.0.1", 0)
    assert bound == ["127.0.0.1", "127.0.0.2"]


async def test_address_that_this_machine_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch, bound: list[str]) -> None:
    resolve(monkeypatch, LACKING, LOOPBACK)
    await free_address(Exposure(host="box", port=0, has_keys=True, is_insecure=True), "--port")
    assert bound == ["127.0.0.1"]


async def test_host_without_an_address_of_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, LACKING)
    with fails(Reason.INVALID_ARGUMENT, "host", "cannot listen on port 8080 on box"):
        await free_address(Exposure(host="box", port=8080, has_keys=True, is_insecure=True), "--port")


async def test_name_with_one_address_beyond_loopback_needs_protection(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, LOOPBACK, LACKING)
    with fails(Reason.INVALID_ARGUMENT, "TLS"):
        await free_address(Exposure(host="box", port=0), "--port")
