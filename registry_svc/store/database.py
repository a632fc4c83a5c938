"""The registry's database: its engine and transactions, and the port of each kind of database."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Protocol

import structlog
from sqlalchemy import URL, Connection, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from registry_svc.store.postgres import PostgresDatabase
from registry_svc.store.schema import SCHEMA
from registry_svc.store.sqlite import SqliteDatabase
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft.sql.opening import opening
from weft.sql.schema import bring_up_to_date

log = structlog.get_logger("weft.registry.store")


class Transactions(Protocol):
    """See SqlStore. Transactions run one after the other, and each is on disk when its block has been left."""

    def transaction(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """One transaction. Raises SERVICE_UNAVAILABLE when the database fails; then nothing of it was written."""
        ...


class Database(Protocol):
    """One database, with one registry on it at a time."""

    url: URL
    driver_errors: tuple[type[Exception], ...]
    """Exceptions of the driver that SQLAlchemy does not wrap."""

    def take(self) -> AsyncEngine:
        """Take ownership at the latest with the engine's first connection; raises ALREADY_EXISTS when it is taken."""
        ...

    def require_whole(self, connection: Connection) -> None:
        """Raise the error that `weft.sql.opening` explains when the database is damaged, as far as that is checked."""
        ...

    async def mark(self, connection: AsyncConnection) -> None:
        """Record the new owner in the schema, once that is up to date, within `connection`'s transaction."""
        ...

    async def release(self) -> None:
        """Close the engine and give ownership up. Safe to call twice, or when never taken."""
        ...

    def explain(self, error: Exception) -> str:
        """Return what the log may contain of a failure: no written values, and no password."""
        ...


def database_of(database_url: str) -> Database:
    """The database behind a URL; raises INVALID_ARGUMENT when it is of no kind that is supported."""
    match _parsed(database_url):
        case URL(drivername="sqlite+aiosqlite") as url:
            return SqliteDatabase(url)
        case URL(drivername="postgresql+asyncpg") as url:
            return PostgresDatabase(url)
    raise invalid_field("database_url", "must begin with sqlite+aiosqlite:// or postgresql+asyncpg://")


def _parsed(database_url: str) -> URL:
    # Not chained: the causes quote the URL or parts of it, and in it may be a password.
    try:
        return make_url(database_url)
    except (ArgumentError, ValueError):
        raise invalid_field("database_url", "must be a URL such as postgresql+asyncpg://user@host/weft") from None


class RegistryDatabase:
    """The registry's database: opened with ownership and the newest schema, and used one transaction at a time.

    One registry owns the database: see sqlite.py and postgres.py for how. Raises INVALID_ARGUMENT when the kind of
    `database_url` is not supported.
    """

    def __init__(self, database_url: str) -> None:
        self._database: Database = database_of(database_url)
        self._failures: tuple[type[Exception], ...] = (SQLAlchemyError, OSError, *self._database.driver_errors)
        self._engine: AsyncEngine | None = None
        # SQLite ends a transaction that reads, then writes, after another one has written in between.
        self._turn = asyncio.Lock()

    async def open(self) -> None:
        """Take ownership and bring the schema up to date; raises ALREADY_EXISTS when another registry owns it."""
        try:
            with opening(SCHEMA.owner, self._database.url, self._database.driver_errors):
                self._engine = self._database.take()
                async with self._turn, self._engine.begin() as connection:
                    await connection.run_sync(self._database.require_whole)
                    await connection.run_sync(bring_up_to_date, SCHEMA)
                    await self._database.mark(connection)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Give up ownership and close the engine. Safe to call twice, or when never opened."""
        self._engine = None
        await self._database.release()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        """One transaction, for the stores of other tables in this database as well. Raises SERVICE_UNAVAILABLE."""
        async with self._turn:
            if self._engine is None:
                raise WeftError(Reason.SERVICE_UNAVAILABLE, "the registry's database is not open")
            with self._explained():
                async with self._engine.begin() as connection:
                    yield connection

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except self._failures as error:
            # Not `log.exception`: tracebacks show local variables, and among them would be ticket keys.
            log.error("database failed", error=self._database.explain(error))  # noqa: TRY400
            # Nor chained, as PostgreSQL's own errors quote rows.
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the registry's database failed; its log has details") from None
