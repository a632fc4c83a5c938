"""How many tasks each tenant has that are not at their end."""

import asyncio

from router_svc.tasks.config import TaskLimits
from router_svc.tasks.store_port import TaskStore
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

RECOUNT_SECONDS = 5.0
"""A tenant that seems to have too many is counted again, but not more often than this."""


class OpenCounts:
    """Counted with every sweep; in between only what is added here is known: rather too many than too few."""

    def __init__(self, store: TaskStore, limits: TaskLimits, clock: Clock) -> None:
        self._store = store
        self._limits = limits
        self._clock = clock
        self._open: dict[str, int] = {}
        self._new: dict[str, int] = {}
        """Those that have come since the last count began."""
        self._counted_at = float("-inf")
        self._counting = asyncio.Lock()

    def add(self, tenant: str) -> None:
        """One more."""
        self._new[tenant] = self._new.get(tenant, 0) + 1

    async def require(self, tenant: str) -> None:
        """Raises TOO_MANY_RESOURCES where a tenant has as many as it may."""
        if self._has_room(tenant):
            return
        if self._clock.monotonic() - self._counted_at >= RECOUNT_SECONDS:
            await self.count()
        if not self._has_room(tenant):
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"the tenant has {self._limits.max_open_per_tenant} tasks that are not at their end, which is as many "
                "as it may (router.tasks.max_open_per_tenant); send more when some are done",
                retry_after_seconds=RECOUNT_SECONDS,
            )

    async def count(self) -> None:
        """Count anew. Raises SERVICE_UNAVAILABLE."""
        async with self._counting:
            self._counted_at = self._clock.monotonic()
            # They count until it is known that they are counted: others ask meanwhile, and a count may fail.
            before = dict(self._new)
            self._open = dict(await self._store.open_counts())
            since = {tenant: count - before.get(tenant, 0) for tenant, count in self._new.items()}
            self._new = {tenant: count for tenant, count in since.items() if count}

    def _has_room(self, tenant: str) -> bool:
        return self._open.get(tenant, 0) + self._new.get(tenant, 0) < self._limits.max_open_per_tenant
