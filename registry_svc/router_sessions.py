"""Sessions of routers: registration, heartbeats and expiry."""

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any

import grpc
from typing_extensions import override

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.policy.limits import require_room
from weft.api.registry.v1 import router_session_service_pb2 as pb
from weft.api.registry.v1 import router_session_service_pb2_grpc
from weft.api.registry.v1.registry_service_pb2 import Change
from weft.api.registry.v1.router_pb2 import Router
from weft.kernel.channels.rpc import AnsweringServicer
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.schemas.field_rules import check_message
from weft.kernel.services.service_lifecycle import BackgroundLoop
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.timestamps import datetime_of, duration_of, stamp_of
from weft.sql.store import Store
from weft.sql.sweeper import safely

Context = grpc.aio.ServicerContext[Any, Any]

log = get_logger("weft.registry")

MAX_REPLACED = 16
"""Maximum remembered earlier incarnations per router."""
FROZEN_AFTER_INTERVALS = 3
"""A round that is more than this many intervals late means that the registry was frozen."""


class RouterSessions(BackgroundLoop):
    """Registers routers, records their heartbeats, and deletes those that are silent for the session lifetime.

    Sessions survive a restart of the registry, which starts a new lifetime. The core's `routers` has the known routers.
    """

    loop_name = "registry-routers"

    def __init__(self, core: RegistryCore, database: Store) -> None:
        self._core = core
        self._database = database
        self._clock = core.clock
        self.lifetime_seconds = core.config.router_session_seconds
        self.interval_seconds = core.config.router_beat_interval_seconds
        self._last_heartbeats: dict[str, float] = {}
        """Time of each router's last heartbeat, in monotonic seconds."""
        self._replaced: dict[str, deque[str]] = {}
        """Replaced incarnations of each router. Not stored, so a restart forgets them."""
        self._has_routers = asyncio.Event()

    @override
    async def start(self) -> None:
        """Loads the routers, none of which leads until it reports so again. Raises SERVICE_UNAVAILABLE."""
        rows = await self._database.read(lambda tx: tx.rows("SELECT * FROM routers"))
        self._core.routers = {
            row.name: Router(
                name=row.name,
                incarnation=row.incarnation,
                address=row.address,
                version=row.version,
                register_time=stamp_of(row.registered_at),
            )
            for row in sorted(rows, key=lambda row: str(row.name))
        }
        self.extend_grace()
        await super().start()

    @override
    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Stops expiry; the routers stay stored. Safe to call twice, or when never started."""
        await super().stop(grace_seconds)
        self._core.routers = {}

    async def register(self, request: pb.RegisterRouterRequest) -> None:
        """Registers a router from a valid request.

        Raises ALREADY_EXISTS if a router at another address has the name, or another process has replaced this one;
        TOO_MANY_RESOURCES and SERVICE_UNAVAILABLE.
        """
        await self._core.write(lambda: self._register(request))

    async def beat(self, request: pb.BeatRouterRequest) -> None:
        """Records a heartbeat. Raises SESSION_UNKNOWN."""
        self._core.require_open()
        known = self._core.routers.get(request.name)
        if known is None or known.incarnation != request.incarnation:
            raise WeftError(Reason.SESSION_UNKNOWN, f"the router {request.name} is not registered; register it again")
        self._last_heartbeats[request.name] = self._clock.monotonic()
        if known.leading != request.leading:
            changed = Router()
            changed.CopyFrom(known)
            changed.leading = request.leading
            self._keep(changed)

    async def unregister(self, name: str, incarnation: str) -> None:
        """Deletes a router. Ignores an unknown one or an earlier incarnation."""

        async def leave() -> None:
            known = self._core.routers.get(name)
            if known is not None and known.incarnation == incarnation:
                await self._delete([name])
                log.info("router left", router=name)

        await self._core.write(leave)

    async def sweep(self) -> None:
        """Deletes silent routers."""
        now = self._clock.monotonic()
        silent = [name for name, heard in self._last_heartbeats.items() if now - heard >= self.lifetime_seconds]
        if silent:
            await self._delete(silent)
            log.warning("routers are silent", routers=", ".join(sorted(silent)))

    async def _register(self, request: pb.RegisterRouterRequest) -> None:
        known = self._core.routers.get(request.name)
        if known is not None and known.address != request.address:
            raise WeftError(
                Reason.ALREADY_EXISTS,
                f"the name {request.name} belongs to the router at {known.address}; "
                "give this one another (router.name), or wait until that one's session has ended",
                metadata={"field": "name"},
            )
        if request.incarnation in self._replaced.get(request.name, ()):
            # If both processes were accepted, they would take the name from each other with every heartbeat.
            raise WeftError(
                Reason.ALREADY_EXISTS,
                f"another process at {request.address} has registered as {request.name} since; end one of both",
                metadata={"field": "name"},
            )
        others = sorted(self._core.routers.keys() - {request.name})
        if others and not request.shares_database:
            raise WeftError(
                Reason.ALREADY_EXISTS,
                f"this mesh has the router {others[0]}; a second one stands by for it where both have one PostgreSQL "
                "database (router.database_url)",
                metadata={"field": "name"},
            )
        require_room("routers", len(self._core.routers), int(known is None), self._core.config.max_routers)
        router = Router(
            name=request.name,
            incarnation=request.incarnation,
            address=request.address,
            version=request.version,
            leading=request.leading,
            register_time=stamp_of(self._clock.utc_now()),
        )
        row = {
            "name": router.name,
            "incarnation": router.incarnation,
            "address": router.address,
            "version": router.version,
            "registered_at": datetime_of(router.register_time),
        }
        await self._database.run(lambda tx: tx.replace("routers", "name", row))
        if known is not None and known.incarnation != router.incarnation:
            self._replaced.setdefault(router.name, deque(maxlen=MAX_REPLACED)).append(known.incarnation)
        self._last_heartbeats[router.name] = self._clock.monotonic()
        self._keep(router)
        self._has_routers.set()
        log.info("router registered", router=router.name, address=router.address)

    def _keep(self, router: Router) -> None:
        changes = [Change(router=router)]
        if router.leading:
            # Only one router leads: the database has ended the lead of the former one.
            for name, other in self._core.routers.items():
                if other.leading and name != router.name:
                    former = Router()
                    former.CopyFrom(other)
                    former.leading = False
                    self._core.routers[name] = former
                    changes.append(Change(router=former))
        self._core.routers[router.name] = router
        self._core.publish(changes)

    async def _delete(self, names: Iterable[str]) -> None:
        gone = sorted(names)
        await self._database.run(lambda tx: tx.delete("routers", "name", gone))
        for name in gone:
            self._last_heartbeats.pop(name, None)
            self._core.routers.pop(name, None)
            self._replaced.pop(name, None)
        self._core.publish([Change(deleted_router=name) for name in gone])

    def extend_grace(self) -> None:
        """Counts every router as heard now, because the registry rejected their heartbeats until now."""
        now = self._clock.monotonic()
        self._last_heartbeats = dict.fromkeys(self._core.routers, now)
        if self._last_heartbeats:
            self._has_routers.set()

    @override
    async def _run(self) -> None:
        while True:
            # A mesh without separate routers, such as a single `weft up`, has nothing to wake up for.
            self._has_routers.clear()
            if not self._core.routers:
                await self._has_routers.wait()
            slept_at = self._clock.monotonic()
            await self._clock.sleep(self.interval_seconds)
            if self._clock.monotonic() - slept_at > FROZEN_AFTER_INTERVALS * self.interval_seconds:
                log.warning("registry was suspended", seconds=round(self._clock.monotonic() - slept_at, 1))
                self.extend_grace()
                continue
            await safely("routers", lambda: self._core.writer.run(self.sweep))


class RouterSessionServicer(AnsweringServicer, router_session_service_pb2_grpc.RouterSessionServiceServicer):
    """See RouterSessionService in the contract."""

    def __init__(self, sessions: RouterSessions) -> None:
        self._sessions = sessions

    @override
    async def RegisterRouter(self, request: pb.RegisterRouterRequest, context: Context) -> pb.RegisterRouterResponse:
        check_message(request)
        await self._sessions.register(request)
        return pb.RegisterRouterResponse(
            beat_interval=duration_of(self._sessions.interval_seconds),
            session_lifetime=duration_of(self._sessions.lifetime_seconds),
        )

    @override
    async def BeatRouter(self, request: pb.BeatRouterRequest, context: Context) -> pb.BeatRouterResponse:
        check_message(request)
        await self._sessions.beat(request)
        return pb.BeatRouterResponse()

    @override
    async def UnregisterRouter(
        self, request: pb.UnregisterRouterRequest, context: Context
    ) -> pb.UnregisterRouterResponse:
        await self._sessions.unregister(request.name, request.incarnation)
        return pb.UnregisterRouterResponse()
