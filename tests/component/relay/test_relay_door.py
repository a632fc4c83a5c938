"""What strangers find at the address where runners join."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router_svc.relay import RELAY_SERVICE, Relay
from router_svc.router_config import RelayConfig
from weft.kernel.channels.rpc import open_channel
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.time.clock import SystemClock
from weft_app.compose.certificate import fingerprint_of, fingerprint_of_pem
from weft_app.compose.home import WeftHome
from weft_app.compose.join_address import _context, _peer_certificate, parse_join_address
from weft_app.compose.relay import RelayListener
from weft_app.config.config import RelaySettings
from weft_testing.certificates import Authority

LIMIT_SECONDS = 10.0


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the relay's public address."""
    home = WeftHome(tmp_path)
    home.create()
    relay = Relay(RelayConfig(address="unix:/router.sock"), SystemClock())
    door = RelayListener(RelaySettings(listen="127.0.0.1:0"), home, relay)
    await door.start()
    try:
        async with open_channel(door.endpoint.url.removeprefix("http://")) as channel:
            yield channel
    finally:
        await door.stop(0.0)


async def test_port_serves_only_the_relay(door: grpc.aio.Channel) -> None:
    for method in (
        "/weft.api.runner.v1.RunnerService/Describe",
        "/weft.api.runner.v1.GenerationService/Generate",
        "/weft.api.runner.v1.EmbeddingService/Embed",
        "/weft.api.router.v1.InferenceService/Generate",
        "/weft.api.registry.v1.RunnerSessionService/OpenSession",
        "/weft.api.registry.v1.RegistryService/ListResources",
        "/weft.api.registry.v1.JoinTokenService/CreateJoinToken",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/grpc.health.v1.Health/Watch",
    ):
        rpc: Any = door.stream_stream(method)
        # Nothing is sent after the head: where that is refused meanwhile, grpc fails to send before it reads that.
        call = rpc(timeout=LIMIT_SECONDS, metadata=(("weft-runner", "laptop"),))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_relay_health_can_be_checked(door: grpc.aio.Channel) -> None:
    stub: Any = health_pb2_grpc.HealthStub(door)
    for service in ("", "readiness", RELAY_SERVICE):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=LIMIT_SECONDS)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_unusable_address_is_reported_by_the_name_of_its_setting(tmp_path: Path) -> None:
    """It was reported as a wrong `host`, or as in use without a word of what to change."""
    home = WeftHome(tmp_path)
    home.create()
    relay = Relay(RelayConfig(address="unix:/router.sock"), SystemClock())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        in_use = f"127.0.0.1:{taken.getsockname()[1]}"
        for address, why in ((in_use, "it is in use; choose another"), ("192.0.2.77:0", "Cannot assign requested")):
            with pytest.raises(WeftError, match=f"relay.listen: cannot listen on {address}: {why}"):
                await RelayListener(RelaySettings(listen=address), home, relay).start()


async def test_renewed_certificate_is_shown_to_runners_that_join_later(tmp_path: Path) -> None:
    """It was read only at the start: once the old one had expired, no runner could join any more."""
    home = WeftHome(tmp_path)
    home.create()
    authority = Authority()
    files = authority.issue("localhost").write(tmp_path)
    listener = RelayListener(
        RelaySettings(listen="127.0.0.1:0", certificate_file=files.certificate_file, key_file=files.key_file),
        home,
        Relay(RelayConfig(address="unix:/router.sock"), SystemClock()),
    )
    await listener.start()
    address = parse_join_address(listener.endpoint.url)

    async def shown() -> str:
        return fingerprint_of((await asyncio.to_thread(_peer_certificate, address, _context()))[0])

    try:
        for renewed in (authority.issue("localhost"), authority.issue("localhost")):
            renewed.write(tmp_path)
            assert await shown() == fingerprint_of_pem(renewed.certificate)
    finally:
        await listener.stop(0.0)
