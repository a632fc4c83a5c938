"""This router's session with the registry: registration, heartbeats, leadership and departure."""

import hashlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import grpc
from typing_extensions import override

from weft import __version__
from weft.api.registry.v1 import router_session_service_pb2 as pb
from weft.api.registry.v1 import router_session_service_pb2_grpc
from weft.kernel.channels.rpc import calling
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import Service, start_critical, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import seconds_of
from weft.kernel.values.names import MAX_NAME_CHARS, new_id

if TYPE_CHECKING:
    import asyncio

    from weft.api.registry.v1.router_session_service_pb2_grpc import RouterSessionServiceAsyncStub

log = get_logger("weft.router")

CALL_TIMEOUT_SECONDS = 2.0
LEAVE_TIMEOUT_SECONDS = 1.0
FIRST_RETRY_SECONDS = 0.25
MAX_RETRY_SECONDS = 2.0
DIGEST_CHARS = 6


def default_router_name(host: str, address: str) -> str:
    """Returns the name of a router without a configured one: stable across restarts at the same address."""
    plain = re.sub(r"[^a-z0-9-]+", "-", host.partition(".")[0].lower()).strip("-") or "host"
    digest = hashlib.blake2b(address.encode()).hexdigest()[:DIGEST_CHARS]
    return f"router-{plain[: MAX_NAME_CHARS // 2]}-{digest}"


class RouterAnnouncement(Service):
    """Keeps a router registered, and registers it again if the registry does not know it."""

    def __init__(
        self,
        name: str,
        address: str,
        connect: Callable[[], grpc.aio.Channel],
        clock: Clock,
        *,
        leads: Callable[[], bool] = lambda: True,
        shares_database: bool = False,
    ) -> None:
        """`address`: for gateways. `connect` opens a channel to the registry.

        `leads`: whether it leads. `shares_database`: whether other routers may stand by for it.
        """
        self._name = name
        self._address = address
        self._connect = connect
        self._leads = leads
        self._shares_database = shares_database
        self._registry: grpc.aio.Channel | None = None
        self._incarnation = new_id("inc")
        self._clock = clock
        self._stub: RouterSessionServiceAsyncStub | None = None
        self._task: asyncio.Task[None] | None = None
        self._refused = ""
        """Why the last registration was refused; used to log a reason only once."""

    @override
    async def start(self) -> None:
        """Start. Returns immediately; the router is registered once the registry answers."""
        self._registry = self._connect()
        self._stub = cast(
            "RouterSessionServiceAsyncStub", router_session_service_pb2_grpc.RouterSessionServiceStub(self._registry)
        )
        self._task = start_critical(self._keep(), name="router-announcement")

    async def tell(self) -> None:
        """Report immediately whether it leads."""
        if self._task is None:
            return
        try:
            with calling(Reason.SERVICE_UNAVAILABLE):
                await self._beat()
        except WeftError as error:
            # The next heartbeat reports it.
            log.info("router could not report that it leads", router=self._name, why=error.message)

    @override
    async def stop(self, grace_seconds: float) -> None:
        """Leave the mesh. Safe to call twice or without a start."""
        if self._task is None or self._stub is None or self._registry is None:
            return
        task, self._task = self._task, None
        await stop_tasks([task])
        request = pb.UnregisterRouterRequest(name=self._name, incarnation=self._incarnation)
        try:
            with calling(Reason.SERVICE_UNAVAILABLE):
                await self._stub.UnregisterRouter(request, timeout=LEAVE_TIMEOUT_SECONDS)
        except WeftError as error:
            # Its session will expire.
            log.info("router could not leave", router=self._name, why=error.message)
        await self._registry.close(grace=None)

    async def _keep(self) -> None:
        pause = FIRST_RETRY_SECONDS
        interval: float | None = None
        while True:
            try:
                with calling(Reason.SERVICE_UNAVAILABLE):
                    if interval is None:
                        interval = await self._register()
                    else:
                        await self._beat()
            except WeftError as error:
                if error.reason is Reason.SESSION_UNKNOWN:
                    interval = None
                    continue
                self._note_refusal(error)
                await self._clock.sleep(pause)
                pause = min(pause * 2, MAX_RETRY_SECONDS)
                continue
            self._refused, pause = "", FIRST_RETRY_SECONDS
            await self._clock.sleep(interval)

    async def _register(self) -> float:
        assert self._stub is not None, "started"
        request = pb.RegisterRouterRequest(
            name=self._name,
            incarnation=self._incarnation,
            address=self._address,
            version=__version__,
            leading=self._leads(),
            shares_database=self._shares_database,
        )
        answer = await self._stub.RegisterRouter(request, timeout=CALL_TIMEOUT_SECONDS)
        log.info("registered", router=self._name, address=self._address)
        return seconds_of(answer.beat_interval)

    async def _beat(self) -> None:
        assert self._stub is not None, "started"
        request = pb.BeatRouterRequest(name=self._name, incarnation=self._incarnation, leading=self._leads())
        await self._stub.BeatRouter(request, timeout=CALL_TIMEOUT_SECONDS)

    def _note_refusal(self, error: WeftError) -> None:
        if error.reason is not Reason.SERVICE_UNAVAILABLE and error.message != self._refused:
            self._refused = error.message
            log.warning("router not registered", router=self._name, reason=error.reason.name, why=error.message)
