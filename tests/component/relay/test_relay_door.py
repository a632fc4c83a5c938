"""What strangers find at the address where runners join."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router_svc.config import RelayConfig
from router_svc.relay import RELAY_SERVICE, Relay
from weft.kernel.clock import SystemClock
from weft.kernel.rpc import open_channel
from weft_app.compose.home import WeftHome
from weft_app.compose.relay import RelayListener
from weft_app.config.config import RelaySettings

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
