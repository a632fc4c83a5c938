"""HTTPS: supported and refused protocols, and the replacement of the certificate."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from gateway_script import FixedFleet, ScriptedDispatcher
from registry_script import ScriptedRegistry

import gateway.gateway_service
from gateway.gateway_config import ConnectionLimits, EdgeTls, GatewayConfig
from gateway.gateway_service import GatewayService
from gateway.ports import GatewayPorts
from weft.kernel.channels.tls import TlsFiles
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft_testing.certificates import Authority

ELSEWHERE = "0.0.0.0"


@pytest.fixture
def ca() -> Authority:
    return Authority()


@pytest.fixture
def files(ca: Authority, tmp_path: Path) -> TlsFiles:
    return ca.issue("127.0.0.1").write(tmp_path)


def service(config: GatewayConfig) -> GatewayService:
    ports = GatewayPorts(dispatcher=ScriptedDispatcher(), fleet=FixedFleet.of(), registry=ScriptedRegistry())
    return gateway.gateway_service.build(config, ports)


SHORTENED = "gateway.http.server.HANDSHAKE_TIMEOUT_SECONDS"


def edge_tls(files: TlsFiles) -> EdgeTls:
    return EdgeTls(certificate_file=files.certificate_file, key_file=files.key_file)


@asynccontextmanager
async def serving(files: TlsFiles, config: GatewayConfig | None = None) -> AsyncIterator[GatewayService]:
    running = service(replace(config or GatewayConfig(port=0), tls=edge_tls(files)))
    await running.start()
    try:
        yield running
    finally:
        await running.stop(grace_seconds=0)


def trusting(ca: Authority) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=ca.root.decode())
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


async def is_answered(edge: GatewayService, context: ssl.SSLContext) -> bool:
    """Whether the application answers a request: with the error that there is no runner."""
    url = f"https://127.0.0.1:{edge.port}/health"
    async with aiohttp.ClientSession() as http, http.get(url, ssl=context) as response:
        return response.status == 503 and "status" in await response.json()


async def first_bytes(port: int, words: bytes) -> bytes:
    """The answer of a connection to `words`, until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(words)
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_https_requests_are_served_with_http_1_and_modern_tls(ca: Authority, files: TlsFiles) -> None:
    async with serving(files) as edge:
        assert edge.url == f"https://127.0.0.1:{edge.port}"
        assert await is_answered(edge, trusting(ca))
        reader, writer = await asyncio.open_connection("127.0.0.1", edge.port, ssl=trusting(ca))
        spoken = writer.get_extra_info("ssl_object")
        assert (spoken.version(), spoken.selected_alpn_protocol()) == ("TLSv1.3", "http/1.1")
        writer.close()
        await writer.wait_closed()
        del reader


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_tls_older_than_1_2_is_rejected(ca: Authority, files: TlsFiles) -> None:
    old = trusting(ca)
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = ssl.TLSVersion.TLSv1
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    async with serving(files) as edge:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", edge.port, ssl=old)
        assert await is_answered(edge, trusting(ca))


@pytest.mark.parametrize(
    "words",
    [
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\xff\xff" + b"\x00" * 100_000,
        b"\x00" * 1000,
    ],
    ids=["plain HTTP", "HTTP/2 preface", "a hello without end", "garbage"],
)
async def test_non_tls_connection_is_closed_and_affects_no_other(
    ca: Authority, files: TlsFiles, words: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SHORTENED, 0.2)
    async with serving(files) as edge:
        assert b"HTTP" not in await first_bytes(edge.port, words)
        assert await is_answered(edge, trusting(ca))


async def test_incomplete_tls_handshake_times_out(
    ca: Authority, files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SHORTENED, 0.05)
    async with serving(files) as edge:
        assert await first_bytes(edge.port, b"") == b""
        assert await is_answered(edge, trusting(ca))


async def test_error_before_the_application_is_readable_over_tls(ca: Authority, files: TlsFiles) -> None:
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    config = GatewayConfig(port=0, connections=ConnectionLimits(linger_seconds=0.05))
    async with serving(files, config) as edge:
        reader, writer = await asyncio.open_connection("127.0.0.1", edge.port, ssl=trusting(ca))
        writer.write(b"this is no HTTP\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 400")
        with suppress(ConnectionError):
            await reader.read()
        writer.close()
    assert faults == []


async def test_new_certificate_applies_to_new_connections_and_existing_ones_continue(
    files: TlsFiles, ca: Authority, tmp_path: Path
) -> None:
    other = Authority()
    async with serving(files) as edge:
        async with aiohttp.ClientSession() as old_client:
            url, context = f"https://127.0.0.1:{edge.port}/health", trusting(ca)
            async with old_client.get(url, ssl=context) as response:
                await response.read()
            other.issue("127.0.0.1").write(tmp_path)
            assert await is_answered(edge, trusting(other))
            async with old_client.get(url, ssl=context) as response:
                assert await response.read()
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await is_answered(edge, trusting(ca))


async def test_unusable_new_files_keep_the_old_certificate(files: TlsFiles, ca: Authority) -> None:
    assert files.key_file is not None
    async with serving(files) as edge:
        files.key_file.write_bytes(b"half a k")
        assert await is_answered(edge, trusting(ca))


async def test_key_file_readable_by_others_prevents_startup(files: TlsFiles) -> None:
    assert files.key_file is not None
    files.key_file.chmod(0o644)
    with pytest.raises(FieldError, match="0644"):
        await service(GatewayConfig(port=0, tls=edge_tls(files))).start()


@pytest.mark.parametrize(
    ("has_keys", "has_tls", "is_elsewhere", "missing"),
    [
        (False, False, False, ("auth.required", "gateway.tls.certificate_file")),
        (False, True, False, ("auth.required",)),
        (False, False, True, ("auth.required",)),
        (True, False, False, ("gateway.tls.certificate_file", "gateway.tls_terminated_elsewhere")),
        (True, True, False, ()),
        (True, False, True, ()),
    ],
)
async def test_non_loopback_listener_requires_keys_and_tls(
    files: TlsFiles, has_keys: bool, has_tls: bool, is_elsewhere: bool, missing: tuple[str, ...]
) -> None:
    tls = edge_tls(files) if has_tls else EdgeTls()
    edge = service(
        GatewayConfig(host=ELSEWHERE, port=0, auth_required=has_keys, tls=tls, tls_terminated_elsewhere=is_elsewhere)
    )
    if not missing:
        await edge.start()
        socket.create_connection(("127.0.0.1", edge.port)).close()
        await edge.stop(grace_seconds=0)
        return
    with pytest.raises(WeftError, match="not a loopback address") as refused:
        await edge.start()
    named = [
        setting
        for setting in ("auth.required", "gateway.tls.certificate_file", "gateway.tls_terminated_elsewhere")
        if setting in refused.value.message
    ]
    assert set(missing) <= set(named)
    assert ("auth.required" in named) is not has_keys
