import asyncio
import socket
import tempfile
from pathlib import Path

import pytest
from gateway_script import FixedFleet, ScriptedDispatcher, serving
from registry_script import ScriptedRegistry

from gateway.gateway_config import GatewayConfig
from gateway.gateway_service import GatewayService, build
from gateway.ports import GatewayPorts
from weft.client._home import is_served
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason


def gateway_at(host: str, port: int) -> GatewayService:
    return build(GatewayConfig(host=host, port=port), scripted_ports())


def scripted_ports() -> GatewayPorts:
    return GatewayPorts(dispatcher=ScriptedDispatcher(), fleet=FixedFleet.of(), registry=ScriptedRegistry())


async def test_port_in_use_error_suggests_a_fix() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(WeftError, match=f"port {port} on 127.0.0.1 is taken.*--port") as caught:
            await gateway_at("127.0.0.1", port).start()
    assert caught.value.reason is Reason.ALREADY_EXISTS


async def test_socket_of_a_killed_gateway_is_replaced() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "http.sock"
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(path))
        assert not is_served(path)
        service = build(GatewayConfig(port=0), scripted_ports(), socket_path=path)
        await service.start()
        assert is_served(path)
        await service.stop(grace_seconds=0)
        assert not path.exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "8.8.8.8", "192.0.2.1"])
async def test_address_beyond_loopback_is_rejected(host: str) -> None:
    with pytest.raises(WeftError, match="not a") as caught:
        await gateway_at(host, 0).start()
    assert caught.value.metadata["field"] == "host"


async def test_unknown_host_is_rejected() -> None:
    with pytest.raises(WeftError, match="not an address"):
        await gateway_at("no such host", 0).start()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1", "::1"])
async def test_every_loopback_spelling_is_accepted(host: str) -> None:
    service = gateway_at(host, 0)
    await service.start()
    assert service.port != 0
    assert service.url.endswith(f":{service.port}")
    await service.stop(grace_seconds=0)


async def test_stop_is_safe_twice_and_before_start() -> None:
    service = gateway_at("127.0.0.1", 0)
    await service.stop(grace_seconds=0)
    await service.start()
    await service.stop(grace_seconds=0)
    await service.stop(grace_seconds=0)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", service.port)


async def test_idle_connection_does_not_delay_stop() -> None:
    async with serving() as gateway, gateway.connection() as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"}")
        await asyncio.wait_for(gateway.service.stop(grace_seconds=60), 20)
        assert await reader.read() == b""
