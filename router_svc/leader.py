"""Leadership among routers with the same database: one leads, the others stand by.

The lock, heartbeats and waiting are shared with registries: `weft.sql.ownership`.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack

import grpc
from typing_extensions import override

from router_svc.router_service import RouterService
from router_svc.store.database import ROUTER_OWNER, RouterDatabase
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.health import HealthCheck
from weft.kernel.services.service_lifecycle import Service
from weft.kernel.time.clock import Clock
from weft.sql.ownership import OwnedService, OwnerHeartbeats
from weft.sql.store import Store

SILENCE_SECONDS = 5.0
"""Silence after which a standby closes the leader's connection, as the leader is frozen, and leads."""

HANDOVER_SECONDS = 0.5
"""How long tasks may continue on a stopping leader while a standby waits."""


class LeadingRouter(OwnedService):
    """The duties of the leading router: it places requests, counts, runs tasks, and stores records."""

    def __init__(
        self,
        database: RouterDatabase,
        router: RouterService,
        clock: Clock,
        *,
        before: Sequence[Service],
        after: Sequence[Service],
        checks: Sequence[HealthCheck] = (),
    ) -> None:
        """`before` start before requests are placed and stop afterwards; `after` need placement."""
        self._database = database
        self._router = router
        self._services = (*before, *after)
        self._before = before
        self._after = after
        self._checks = checks
        self._beats = OwnerHeartbeats(database, ROUTER_OWNER, clock, SILENCE_SECONDS)

    @property
    @override
    def heartbeats(self) -> OwnerHeartbeats:
        return self._beats

    @property
    @override
    def service_names(self) -> Sequence[str]:
        return tuple(name for service in self._services for name in service.service_names)

    @override
    def register(self, server: grpc.aio.Server) -> None:
        for service in self._services:
            service.register(server)

    @override
    def health_checks(self) -> Sequence[HealthCheck]:
        return self._checks

    @override
    async def require_files(self, database: Store) -> None:
        """Does nothing, as a router's files are not shared."""

    @override
    async def start(self) -> None:
        """Begins to lead. Raises ALREADY_EXISTS if another router leads, SERVICE_UNAVAILABLE without a database.

        Raises INTERNAL if it owns the database but cannot begin.
        """
        await self._database.open()
        await self.heartbeats.start()
        try:
            for service in self._services:
                await service.start()
        except WeftError as error:
            # Leadership begins only once per process: the process ends, which frees the lock, and its successor stands
            # by. A standby would otherwise wait for a lock that it has itself.
            raise WeftError(Reason.INTERNAL, f"this router could not begin to lead: {error.message}") from error

    @override
    async def stop(self, grace_seconds: float) -> None:
        """Stops leading. If a standby waits, running tasks are handed over soon."""
        if self.heartbeats.sees_standby:
            grace_seconds = min(grace_seconds, HANDOVER_SECONDS)
        async with AsyncExitStack() as ends:
            ends.push_async_callback(self._database.close)
            ends.push_async_callback(self.heartbeats.stop)
            for service in self._before:
                ends.push_async_callback(service.stop, grace_seconds)
            ends.callback(self._router.close)
            for service in self._after:
                ends.push_async_callback(service.stop, grace_seconds)
