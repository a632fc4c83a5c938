"""Keeps a view of the mesh current by the registry's Watch.

Routers and gateways hold one each and go on serving from it while the registry is away.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import grpc
import structlog

from weft.api.registry.v1 import registry_service_pb2, registry_service_pb2_grpc
from weft.dispatch.fleet import FleetView, apply_watch
from weft.kernel.clock import Clock
from weft.kernel.service import start_critical, stop_tasks

if TYPE_CHECKING:
    from weft.api.registry.v1.registry_service_pb2_grpc import RegistryServiceAsyncStub

log = structlog.get_logger("weft.fleet")

FIRST_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 5.0

FleetListener = Callable[[FleetView], None]


class FleetWatcher:
    """Follows the registry's Watch and tells listeners each new FleetView; reconnects for as long as it runs."""

    def __init__(self, registry: grpc.aio.Channel, clock: Clock, *, include_ticket_keys: bool = False) -> None:
        self._stub = cast("RegistryServiceAsyncStub", registry_service_pb2_grpc.RegistryServiceStub(registry))
        self._clock = clock
        self._include_ticket_keys = include_ticket_keys
        self._view = FleetView()
        self._listeners: list[FleetListener] = []
        self._task: asyncio.Task[None] | None = None
        self._first_snapshot = asyncio.Event()
        self._is_following = False
        """Whether the present watch has brought its snapshot."""

    @property
    def view(self) -> FleetView:
        """The newest view; empty before the first snapshot."""
        return self._view

    def subscribe(self, listener: FleetListener) -> None:
        """Call `listener` with every new view, from the event loop."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Begin to follow. Returns at once; `wait_ready` waits for the first snapshot."""
        self._task = start_critical(self._follow(), name="fleet-watcher")

    async def wait_ready(self) -> None:
        """Return once the first snapshot has arrived."""
        await self._first_snapshot.wait()

    async def stop(self) -> None:
        """Stop following; the last view stays readable."""
        if self._task is not None:
            await stop_tasks([self._task])
            self._task = None

    async def _follow(self) -> None:
        pause = FIRST_RETRY_SECONDS
        while True:
            self._is_following = False
            try:
                await self._follow_once()
            except grpc.aio.AioRpcError as error:
                log.warning(
                    "registry watch lost, serving from the last known state",
                    code=error.code().name,
                    why=error.details(),
                )
            except Exception:
                # A watcher that ended would leave its service with an ever older view, and nobody would know.
                log.exception("registry watch failed unexpectedly, watching again")
            # A snapshot is a success, also of a mesh in which nothing has changed.
            pause = FIRST_RETRY_SECONDS if self._is_following else min(pause * 2, MAX_RETRY_SECONDS)
            await self._clock.sleep(pause)

    async def _follow_once(self) -> None:
        request = registry_service_pb2.WatchRequest(include_ticket_keys=self._include_ticket_keys)
        async for response in self._stub.Watch(request):
            self._view = apply_watch(self._view, response)
            self._first_snapshot.set()
            self._is_following = True
            for listener in self._listeners:
                listener(self._view)
