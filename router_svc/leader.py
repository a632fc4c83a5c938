"""Leadership among the routers of one database: one of them leads, the others stand by for its end.

The lock, the heartbeats and the wait for them are those of registries: `weft.sql.ownership`.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack

import grpc
from typing_extensions import override

from router_svc.service import RouterService
from router_svc.store.database import ROUTER_OWNER, RouterDatabase
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.health import HealthCheck
from weft.kernel.reasons import Reason
from weft.kernel.service import Service
from weft.sql.ownership import OwnedService, OwnerBeats
from weft.sql.store import Store

SILENCE_SECONDS = 5.0
"""How long a leader may be silent, as one that is frozen, before a standby ends its connection and leads."""

HANDOVER_SECONDS = 0.5
"""How long tasks under way may go on at a leader that stops while a standby waits for its end."""


class LeadingRouter(OwnedService):
    """What only the router that leads does: it places requests, counts, runs tasks, and keeps records."""

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
        """`before` start before requests are placed, and stop after that; `after` need placement."""
        self._database = database
        self._router = router
        self._services = (*before, *after)
        self._before = before
        self._after = after
        self._checks = checks
        self._has_begun = False
        self._beats = OwnerBeats(database, ROUTER_OWNER, clock, SILENCE_SECONDS)

    @property
    @override
    def beats(self) -> OwnerBeats:
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
        """Raises nothing: a router's files are its own."""

    @override
    async def start(self) -> None:
        """Begins to lead. Raises ALREADY_EXISTS where another router does, SERVICE_UNAVAILABLE without a database."""
        if self._has_begun:
            # What has begun once cannot begin again: the process ends, and its next life stands by.
            raise WeftError(Reason.INTERNAL, "this router could not begin to lead")
        await self._database.open()
        self._has_begun = True
        await self.beats.start()
        for service in self._services:
            await service.start()

    @override
    async def stop(self, grace_seconds: float) -> None:
        """Ends the lead. Where a standby waits for it, tasks under way are soon given back: they go on there."""
        if self.beats.sees_standby:
            grace_seconds = min(grace_seconds, HANDOVER_SECONDS)
        async with AsyncExitStack() as ends:
            ends.push_async_callback(self._database.close)
            ends.push_async_callback(self.beats.stop)
            for service in self._before:
                ends.push_async_callback(service.stop, grace_seconds)
            ends.callback(self._router.close)
            for service in self._after:
                ends.push_async_callback(service.stop, grace_seconds)
