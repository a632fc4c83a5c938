"""Watches of the registry whose connection of an earlier certificate is cut: they begin again."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tls_stage import SECONDS, Echo, count, say

from weft.api.registry.v1 import key_service_pb2, registry_service_pb2
from weft.dispatch.fleet import FleetWatcher
from weft.kernel.channels.rpc import open_channel
from weft.kernel.channels.tls import ServerTls
from weft.kernel.channels.tls_channel import MAX_RETIRED, ChannelSecurity
from weft.kernel.time.clock import SystemClock
from weft_app.compose.grpc_host import GrpcHost
from weft_app.compose.key_ring import KeyRingWatcher
from weft_testing.certificates import Authority


class WatchedRegistry(Echo):
    """A registry that is empty and does not change; it counts the watches that have begun."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: asyncio.Queue[None] = asyncio.Queue()

    def register(self, server: grpc.aio.Server) -> None:
        super().register(server)
        for service, method, snapshot in (
            ("RegistryService", "Watch", registry_service_pb2.WatchResponse(snapshot=registry_service_pb2.Snapshot())),
            ("KeyService", "WatchKeys", key_service_pb2.WatchKeysResponse(snapshot=key_service_pb2.KeySnapshot())),
        ):
            watch: Any = grpc.unary_stream_rpc_method_handler(self._watch_of(snapshot.SerializeToString()))
            handlers = grpc.method_handlers_generic_handler(f"weft.api.registry.v1.{service}", {method: watch})
            server.add_generic_rpc_handlers((handlers,))

    def _watch_of(self, snapshot: bytes) -> Any:
        async def watch(_request: bytes, _context: Any) -> AsyncGenerator[bytes]:
            yield snapshot
            self.begun.put_nowait(None)
            await self.go_on.wait()

        return watch


@pytest.mark.parametrize("watcher", [FleetWatcher, KeyRingWatcher])
async def test_watch_with_a_cut_connection_restarts(
    ca: Authority, mutual: ServerTls, tmp_path: Path, watcher: type[FleetWatcher] | type[KeyRingWatcher]
) -> None:
    files = ca.issue("weft://mesh/caller").write(tmp_path, ca, name="caller")
    host, registry = GrpcHost(tls=mutual), WatchedRegistry()
    address = host.bind("tls:127.0.0.1:0")
    await host.start([registry])
    security = ChannelSecurity(files=files, reload_interval_seconds=0.0)
    async with open_channel(address, security) as channel, asyncio.timeout(SECONDS):
        watching = watcher(channel, SystemClock())
        await watching.start()
        await registry.begun.get()
        # A connection that carries calls is kept: the watch's is the oldest of too many.
        streams = []
        for _ in range(MAX_RETIRED + 1):
            ca.issue("weft://mesh/caller").write(tmp_path, ca, name="caller")
            streams.append(count(channel))
            await streams[-1].read()
        await say(channel)
        await registry.begun.get()
        await watching.stop()
        registry.go_on.set()
    await host.stop(0.0)
