"""Common parts of the services over tables of a router's database."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc
from typing_extensions import override

from router_svc.store.database import RouterDatabase
from weft.kernel.services.service_lifecycle import Service
from weft.sql.sweeper import Sweeper


class Rpcs(NamedTuple):
    """A gRPC service of a store."""

    name: str
    """Fully qualified name."""
    add: Callable[[Any, grpc.aio.Server], None]
    """The generated function that registers the servicer."""
    servicer: object


class StoreService(Service):
    """A service over tables of the router's database: it opens, sweeps and closes the database."""

    def __init__(self, database: RouterDatabase, sweeper: Sweeper, *rpcs: Rpcs) -> None:
        self._database = database
        self._sweeper = sweeper
        self._rpcs = rpcs

    @override
    @property
    def service_names(self) -> Sequence[str]:
        return [each.name for each in self._rpcs]

    @override
    def register(self, server: grpc.aio.Server) -> None:
        for each in self._rpcs:
            each.add(each.servicer, server)

    @override
    async def start(self) -> None:
        """Starts. Raises SERVICE_UNAVAILABLE."""
        await self._database.open()
        await self.begin()
        await self._sweeper.sweep()
        self._sweeper.start()

    async def begin(self) -> None:
        """Called after the database is opened."""

    async def end(self, grace_seconds: float) -> None:
        """Called after the sweeper stops, before the database is closed."""

    @override
    async def stop(self, grace_seconds: float) -> None:
        if self._sweeper.is_started:
            await self._sweeper.stop()
            await self.end(grace_seconds)
            await self._database.close()
