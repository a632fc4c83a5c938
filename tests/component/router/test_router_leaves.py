"""A router that says that it stops, while it still forwards what runs."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from router_svc.announcement import RouterAnnouncement
from weft.api.registry.v1 import router_session_service_pb2 as pb
from weft.api.registry.v1 import router_session_service_pb2_grpc
from weft.kernel.rpc import new_server, open_channel
from weft_testing.fake_clock import FakeClock


class ScriptedRegistry(router_session_service_pb2_grpc.RouterSessionServiceServicer):
    """Remembers what a router has said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    async def RegisterRouter(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.said.append("here")
        response = pb.RegisterRouterResponse()
        response.beat_interval.FromSeconds(2)
        return response

    async def BeatRouter(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.said.append("draining" if request.draining else "there")
        return pb.BeatRouterResponse()

    async def UnregisterRouter(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.said.append("gone")
        return pb.UnregisterRouterResponse()


@pytest.fixture
async def registry(tmp_path: Path) -> AsyncIterator[tuple[ScriptedRegistry, grpc.aio.Channel]]:
    script: ScriptedRegistry = cast("Any", ScriptedRegistry)()
    server, address = new_server(), f"unix:{tmp_path}/registry.sock"
    router_session_service_pb2_grpc.add_RouterSessionServiceServicer_to_server(script, server)
    server.add_insecure_port(address)
    await server.start()
    async with open_channel(address) as channel:
        yield script, channel
    await server.stop(None)


async def test_a_router_that_drains_says_so_at_once_and_with_every_beat(
    registry: tuple[ScriptedRegistry, grpc.aio.Channel],
) -> None:
    script, channel = registry
    clock = FakeClock()
    announcement = RouterAnnouncement("r1", "unix:/r1.sock", clock)
    announcement.start(channel)
    await clock.advance(2.0, sleepers=1)
    await announcement.drain()
    await announcement.drain()
    await clock.advance(2.0, sleepers=1)
    await announcement.stop()
    assert script.said == ["here", "there", "draining", "draining", "gone"]


async def test_a_router_that_was_never_announced_drains_without_a_word(
    registry: tuple[ScriptedRegistry, grpc.aio.Channel],
) -> None:
    await RouterAnnouncement("r1", "unix:/r1.sock", FakeClock()).drain()
    assert registry[0].said == []
