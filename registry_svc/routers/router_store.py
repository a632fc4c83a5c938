"""SQL store of routers."""

from collections.abc import Sequence

from weft.api.registry.v1.router_pb2 import Router
from weft.kernel.timestamps import datetime_of, stamp_of
from weft.sql.store import Store


class SqlRouterStore:
    """Stores the routers with a session. Writes are durable when the call returns.

    All methods raise SERVICE_UNAVAILABLE if the database fails; then nothing was written, unless the acknowledgement of
    the commit was lost.
    """

    def __init__(self, database: Store) -> None:
        self._database = database

    async def load(self) -> Sequence[Router]:
        """Returns all routers, sorted by name. None of them leads until it reports so again."""
        rows = await self._database.read(lambda tx: tx.rows("SELECT * FROM routers"))
        found = (
            Router(
                name=row.name,
                incarnation=row.incarnation,
                address=row.address,
                version=row.version,
                register_time=stamp_of(row.registered_at),
            )
            for row in rows
        )
        return sorted(found, key=lambda router: router.name)

    async def save(self, router: Router) -> None:
        """Stores or replaces a router."""
        row = {
            "name": router.name,
            "incarnation": router.incarnation,
            "address": router.address,
            "version": router.version,
            "registered_at": datetime_of(router.register_time),
        }
        await self._database.run(lambda tx: tx.replace("routers", "name", row))

    async def delete(self, names: Sequence[str]) -> None:
        """Deletes routers. Ignores unknown names."""
        await self._database.run(lambda tx: tx.delete("routers", "name", names))
