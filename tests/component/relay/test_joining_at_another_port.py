"""A runner that joins at a port of the mesh which is not that of its relay."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from relay_harness import TOKEN, soon

from runner_svc.dial_out import DialOut, DialOutConfig, LinkEvent, LinkState
from weft_app.compose.authority import self_signed_certificate
from weft_app.compose.join_address import JoinAddress, JoinDialer, Trust
from weft_testing.free_port import free_port

FINGERPRINT = f"sha256:{'0' * 64}"


@asynccontextmanager
async def http_port(tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    async def answer(_: web.BaseRequest) -> web.Response:
        return web.Response(text="an HTTP API")

    runner, port = web.ServerRunner(web.Server(answer)), free_port()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
    try:
        yield port
    finally:
        await runner.cleanup()


async def why_not_joined(port: int, *, is_tls: bool, trust: Trust) -> str:
    """Returns what is said of the first dial."""
    address = JoinAddress(host="127.0.0.1", port=port, is_tls=is_tls)
    events: list[LinkEvent] = []
    config = DialOutConfig(
        target=address.target,
        open_channel=JoinDialer([address], trust).open,
        token=TOKEN,
        local_address="unix:/nowhere",
    )
    lost = asyncio.Event()

    def note(event: LinkEvent) -> None:
        events.append(event)
        if event.state is LinkState.LOST:
            lost.set()

    dial_out = DialOut(config, note)
    await dial_out.start()
    try:
        await soon(lost.wait())
    finally:
        await dial_out.stop(0.0)
    return next(event.detail for event in events if event.state is LinkState.LOST)


@pytest.mark.parametrize("is_tls", [False, True])
@pytest.mark.parametrize("trust", [Trust(), Trust(fingerprint=FINGERPRINT)])
async def test_plain_http_port_is_detected_and_the_right_port_suggested(is_tls: bool, trust: Trust) -> None:
    """It was said that the address cannot be reached."""
    async with http_port() as port:
        said = await why_not_joined(port, is_tls=is_tls, trust=trust)
    assert said.startswith(f"127.0.0.1:{port} is reachable, but uses plain HTTP instead of gRPC")
    assert "--join-port" in said


async def test_https_port_is_detected(tmp_path: Path) -> None:
    self_signed_certificate(tmp_path, ["127.0.0.1"])
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    async with http_port(tls) as port:
        said = await why_not_joined(port, is_tls=True, trust=Trust(ca=(tmp_path / "cert.pem").read_bytes()))
    assert said.startswith(f"127.0.0.1:{port} is reachable, but uses HTTPS instead of gRPC")


async def test_closed_port_is_unreachable() -> None:
    port = free_port()
    assert await why_not_joined(port, is_tls=False, trust=Trust()) == f"127.0.0.1:{port} cannot be reached"
