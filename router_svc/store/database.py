"""A router's database: a local SQLite file, or PostgreSQL, on which one router leads and others stand by."""

import asyncio
from pathlib import Path
from typing import Any

from typing_extensions import override

from router_svc.policy.lost_commits import Loss
from router_svc.store.commit_count import Promises
from router_svc.store.request_messages import write_request_messages
from weft.kernel.errors.reasons import Reason
from weft.sql.address import address_of
from weft.sql.connections import Row, Tx
from weft.sql.migrations import Schema
from weft.sql.owners import OwnerRole
from weft.sql.store import Store, T, Work

ROUTER_OWNER = OwnerRole(
    service="router",
    table="router_leader",
    standby_reason=Reason.ROUTER_STANDBY,
    advice="gateways find the router that leads automatically",
    replaced_reason=Reason.ROUTER_STANDBY,
    # A router that replaces a frozen one opens its file; a dump or a restore has to have it alone.
    locks_file=True,
    shares_file=True,
)
SCHEMA = Schema(
    owner="router",
    scripts=Path(__file__).parent / "schema",
    version_table="router_alembic_version",
    conversions={"0018": write_request_messages},
)


class RouterDatabase(Store):
    """A database shared by several services: each opens it, and the last close closes it.

    Raises INVALID_ARGUMENT for an unsupported URL.
    """

    def __init__(
        self, database_url: str | Path, *, promise_file: Path | None = None, leads_at: str | None = None
    ) -> None:
        """`promise_file`: stores the number of acknowledged commits; used only for an SQLite file.

        `leads_at`: address of the router that leads while this database is open; None: no leadership.
        """
        file = address_of(database_url).path
        self._promises = None if promise_file is None or file is None else Promises(file, promise_file)
        role = None if leads_at is None else ROUTER_OWNER
        super().__init__(
            database_url, SCHEMA.owner, schema=SCHEMA, role=role, address=leads_at or "", counter=self._promises
        )
        self._users = 0
        self._opening = asyncio.Lock()
        self.write_count = 0
        """Number of ended write transactions; while it is unchanged since before a read, the read saw all of them."""

    @property
    def is_shared(self) -> bool:
        """Whether other routers may open it to stand by."""
        return not self.address.is_sqlite

    @property
    def loss(self) -> Loss | None:
        """Acknowledged commits that were missing when it was opened; None: none, or unknown."""
        return None if self._promises is None else self._promises.loss

    @property
    def notice(self) -> str:
        """A notice of lost data for users and operators; empty: none. Reads a small file."""
        return "" if self._promises is None else self._promises.file.notice()

    @property
    def remedy(self) -> str:
        """The remedy for `notice`."""
        return "" if self._promises is None else self._promises.file.remedy

    @override
    async def open(self, first: Work[None] | None = None) -> None:
        """Connects and migrates the schema if it is not open. Raises ALREADY_EXISTS if another router leads."""
        async with self._opening:
            if not self._users:
                await super().open(first if self._promises is None else self._promises.begin)
            self._users += 1

    @override
    async def close(self) -> None:
        """Removes a user; the last one disconnects. Safe to call if it is not open."""
        async with self._opening:
            self._users = max(0, self._users - 1)
            if not self._users:
                await super().close()
                if self._promises is not None:
                    self._promises.file.close()

    @override
    async def run(self, work: Work[T], *, vital: bool = False) -> T:
        try:
            return await super().run(work, vital=vital)
        finally:
            self.write_count += 1

    async def rows(self, sql: str, /, **values: Any) -> list[Row]:
        """Returns the rows of a read. Raises as `run`."""
        return await self.read(lambda tx: tx.rows(sql, **values))

    async def row(self, sql: str, /, **values: Any) -> Row | None:
        """Returns the first row of a read; None: no row. Raises as `run`."""
        return await self.read(lambda tx: tx.row(sql, **values))

    async def value(self, sql: str, /, **values: Any) -> Any:
        """Returns the first column of the first row of a read; None: no row. Raises as `run`."""
        return await self.read(lambda tx: tx.value(sql, **values))

    async def change(self, sql: str, /, **values: Any) -> int:
        """Runs a write statement; returns how many rows it changed."""
        return await self.run(lambda tx: tx.execute(sql, **values))


def time_of(tx: Tx) -> float:
    """Returns PostgreSQL's clock as UTC seconds since the epoch."""
    return float(tx.value("SELECT date_part('epoch', clock_timestamp())"))
