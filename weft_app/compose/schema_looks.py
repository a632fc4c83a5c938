"""Looks at the schemas of a process's databases, for which no answer waits long."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from weft.api.operations.v1.process_service_pb2 import DatabaseSchema
from weft.kernel.clock import Clock
from weft.kernel.service import stop_tasks


class SchemaSource(Protocol):
    """A database, or what has one."""

    @property
    def known_schema(self) -> DatabaseSchema:
        """The revision of its tables as known here."""
        ...

    async def schema(self) -> DatabaseSchema:
        """Returns that and the revision that the database has; empty where it is not known."""
        ...


SCHEMA_SECONDS = 1.0
"""How long an answer waits for the schemas of databases, which may be frozen."""


class SchemaLooks:
    """The schemas of some databases.

    A look that takes too long goes on, and the next answer waits for the same one: it may use the one connection by
    which a registry owns its database, and a statement that is cancelled breaks its connection.
    """

    def __init__(self, sources: Sequence[SchemaSource], clock: Clock) -> None:
        self._sources = sources
        self._clock = clock
        self._looks: dict[SchemaSource, asyncio.Task[DatabaseSchema]] = {}

    async def known(self) -> list[DatabaseSchema]:
        """Returns the schemas; of a database that has not answered within SCHEMA_SECONDS what is known here."""
        looks = [self._look(source) for source in self._sources]
        if not looks:
            return []
        all_known = asyncio.ensure_future(asyncio.wait(looks))
        late = asyncio.create_task(self._clock.sleep(SCHEMA_SECONDS))
        try:
            await asyncio.wait({all_known, late}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            all_known.cancel()
            await stop_tasks([late])
        return [
            look.result() if look.done() else source.known_schema
            for source, look in zip(self._sources, looks, strict=True)
        ]

    async def stop(self) -> None:
        """Ends the looks that still go on."""
        looks = list(self._looks.values())
        for look in looks:
            look.cancel()
        await asyncio.gather(*looks, return_exceptions=True)

    def _look(self, source: SchemaSource) -> asyncio.Task[DatabaseSchema]:
        look = self._looks.get(source)
        if look is None or look.done():
            look = self._looks[source] = asyncio.create_task(source.schema())
        return look
