"""A channel that picks its server for each call."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from weft.kernel.channels.chosen_channel import PickedChannel
from weft.kernel.channels.rpc import new_server, open_channel
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def server_at(path: Path, status: Any) -> AsyncIterator[grpc.aio.Channel]:
    server, servicer = new_server(), health.aio.HealthServicer()
    await servicer.set("", status)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    async with open_channel(f"unix:{path}") as channel:
        yield channel
    await server.stop(None)


async def test_each_call_uses_the_picked_channel_and_a_stream_keeps_its_own(tmp_path: Path) -> None:
    async with server_at(tmp_path / "a", SERVING) as first, server_at(tmp_path / "b", NOT_SERVING) as second:
        here = [first]
        stub: Any = health_pb2_grpc.HealthStub(PickedChannel(lambda: here[0]))
        request = health_pb2.HealthCheckRequest()
        stream = stub.Watch(request)
        assert (await stream.read()).status == SERVING
        here[0] = second
        assert (await stub.Check(request)).status == NOT_SERVING
        assert (await stub.Watch(request).read()).status == NOT_SERVING
        here[0] = first
        assert (await stub.Check(request, timeout=5.0)).status == SERVING
        assert not stream.done()


async def test_closing_the_picked_channel_leaves_channels_to_their_owner(tmp_path: Path) -> None:
    async with server_at(tmp_path / "a", SERVING) as channel:
        async with PickedChannel(lambda: channel):
            pass
        stub: Any = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING


async def test_call_without_a_server_raises_the_pick_error() -> None:
    def pick() -> grpc.aio.Channel:
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "no router answers")

    stub = cast("Any", health_pb2_grpc.HealthStub(PickedChannel(pick)))
    with pytest.raises(WeftError, match="no router answers"):
        await stub.Check(health_pb2.HealthCheckRequest())
