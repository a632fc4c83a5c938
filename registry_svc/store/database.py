"""The registry's database, SQLite or PostgreSQL: ownership by one registry, engine, and transactions."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import URL, Column, Connection, delete
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from typing_extensions import override

from registry_svc.store.schema import SCHEMA, ownership
from weft.api.operations.v1.process_service_pb2 import DatabaseSchema
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.file_lock import lock_file
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason
from weft.sql.database import SqliteEngine, code_of, file_of, make_private, opening, require_whole, url_of
from weft.sql.owned_postgres import OwnerRole, PostgresOwner
from weft.sql.schema import bring_up_to_date, schema_in
from weft.sql.write_check import write_nothing

log = get_logger("weft.registry.store")

REGISTRY_OWNER = OwnerRole(
    service="registry",
    table=ownership,
    standby_reason=Reason.REGISTRY_STANDBY,
    advice="name both in WEFT_REGISTRY (commands), or in addresses.registry of weft.yaml, to call the one that serves",
)


class Transactions(Protocol):
    """See SqlStore. Transactions run one after the other, and each is on disk when its block has been left."""

    def transaction(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """One transaction. Raises SERVICE_UNAVAILABLE when the database fails; then nothing of it was written."""
        ...


MAX_IDS_PER_STATEMENT = 1_000
"""Ids that one statement names. PostgreSQL and SQLite allow more than 32,000 parameters."""


def parts_of(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yields the ids in parts, each of which one statement may name."""
    for start in range(0, len(ids), MAX_IDS_PER_STATEMENT):
        yield ids[start : start + MAX_IDS_PER_STATEMENT]


async def delete_rows(connection: AsyncConnection, key: Column[Any], ids: Sequence[str]) -> None:
    """Deletes the rows of these keys; unknown ones are ignored."""
    for some in parts_of(ids):
        await connection.execute(delete(key.table).where(key.in_(some)))


class Database(Protocol):
    """One database, with one registry on it at a time."""

    url: URL
    driver_errors: tuple[type[Exception], ...]
    """Exceptions of the driver that SQLAlchemy does not wrap."""
    may_have_standby: bool
    """Whether a registry on another machine may wait for this one's end, and watches its heartbeat."""

    def take(self) -> AsyncEngine:
        """Take ownership at the latest with the engine's first connection; raises ALREADY_EXISTS when it is taken."""
        ...

    async def mark(self, connection: AsyncConnection) -> None:
        """Record the new owner in the schema, once that is up to date, within `connection`'s transaction."""
        ...

    async def beat(self, connection: AsyncConnection) -> bool:
        """Write the owner's heartbeat within `connection`'s transaction; returns whether a standby is connected."""
        ...

    async def release(self) -> None:
        """Close the engine and give ownership up. Safe to call twice, or when never taken."""
        ...

    def explain(self, error: Exception) -> str:
        """Return what the log may contain of a failure: no written values, and no password."""
        ...


class RegistryDatabase:
    """The registry's database: opened with ownership and the newest schema, and used one transaction at a time.

    One registry owns the database: see SqliteDatabase and PostgresOwner for how. Raises INVALID_ARGUMENT when
    `database_url` is of a kind that is not supported.
    """

    def __init__(self, database_url: str | Path, address: str = "") -> None:
        """`address`: where this registry serves, for a standby that refers its callers to the owner."""
        self._database: Database = database_of(database_url, address)
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
                    await connection.run_sync(_require_whole, self._database.url)
                    await connection.run_sync(bring_up_to_date, SCHEMA)
                    await self._database.mark(connection)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Give up ownership and close the engine. Safe to call twice, or when never opened."""
        self._engine = None
        await self._database.release()

    @property
    def may_have_standby(self) -> bool:
        """Whether the owner of this kind of database writes a heartbeat, for a standby that may be there."""
        return self._database.may_have_standby

    async def beat(self) -> bool:
        """Writes one heartbeat of the owner; returns whether a standby is connected.

        Raises TakenOverError where another registry owns the database by now, and SERVICE_UNAVAILABLE, without an entry
        in the log, where the database fails.
        """
        try:
            async with self._turn:
                if self._engine is None:
                    raise WeftError(Reason.SERVICE_UNAVAILABLE, "the registry's database is not open")
                async with self._engine.begin() as connection:
                    return await self._database.beat(connection)
        except self._failures as error:
            # Not chained, see `_explained`.
            message = f"the registry's database does not answer ({code_of(error)})"
            raise WeftError(Reason.SERVICE_UNAVAILABLE, message) from None

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        """One transaction, for the stores of other tables in this database as well. Raises SERVICE_UNAVAILABLE."""
        async with self._turn:
            if self._engine is None:
                raise WeftError(Reason.SERVICE_UNAVAILABLE, "the registry's database is not open")
            with self._explained():
                async with self._engine.begin() as connection:
                    yield connection

    @property
    def known_schema(self) -> DatabaseSchema:
        """The revision of its tables as known here."""
        return DatabaseSchema(service=SCHEMA.owner, known_revision=SCHEMA.newest)

    async def schema(self) -> DatabaseSchema:
        """Returns the revision of its tables, as known here and as the database has it; empty where it is not open."""
        unknown = self.known_schema
        try:
            async with self._turn:
                if self._engine is None:
                    return unknown
                async with self._engine.begin() as connection:
                    return await connection.run_sync(schema_in, SCHEMA)
        except self._failures:
            return unknown

    async def write_failure(self) -> str:
        """Writes without changing anything; returns the database's code of a failure, empty where it succeeds."""
        try:
            async with self._turn:
                if self._engine is None:
                    return "not open"
                async with self._engine.begin() as connection:
                    await write_nothing(connection)
        except self._failures as error:
            return code_of(error)
        return ""

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except self._failures as error:
            # Not `log.exception`: tracebacks show local variables, and among them would be ticket keys.
            log.error("database failed", error=self._database.explain(error))  # noqa: TRY400
            # Nor chained, as PostgreSQL's own errors quote rows.
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the registry's database failed; its log has details") from None


def database_of(database_url: str | Path, address: str = "") -> Database:
    """The database behind a URL; raises INVALID_ARGUMENT when it is of no kind that is supported.

    `address`: where its registry serves.
    """
    match _parsed(database_url):
        case URL(drivername="sqlite+aiosqlite") as url:
            return SqliteDatabase(url)
        case URL(drivername="postgresql+asyncpg") as url:
            return PostgresOwner(url, REGISTRY_OWNER, address)
    raise invalid_field("database_url", "must begin with sqlite+aiosqlite:// or postgresql+asyncpg://")


def _parsed(database_url: str | Path) -> URL:
    # Not chained: the causes quote the URL or parts of it, and in it may be a password.
    try:
        return url_of(database_url)
    except (ArgumentError, ValueError):
        raise invalid_field("database_url", "must be a URL such as postgresql+asyncpg://user@host/weft") from None


def _require_whole(connection: Connection, url: URL) -> None:
    """Raise the error that `weft.sql.database` explains for a damaged file; a server checks its own files."""
    if url.get_backend_name() == "sqlite":
        require_whole(connection, url)


class FileLock:
    """An exclusive lock on a file, given up by `release` and, whatever happens, by the end of the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock; raises ALREADY_EXISTS when another process or registry holds it."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            lock_file(descriptor)
        except BlockingIOError as error:
            os.close(descriptor)
            raise REGISTRY_OWNER.owned_elsewhere() from error
        self._descriptor = descriptor

    def release(self) -> None:
        """Release the lock, if it is held.

        The file stays: removing it would let a third process lock a new file while a second still waits for this one.
        """
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class SqliteDatabase(Database):
    """SQLite, owned by a lock file beside the database: the lock cannot be lost while the process lives."""

    driver_errors: tuple[type[Exception], ...] = ()
    may_have_standby = False

    def __init__(self, url: URL) -> None:
        self.url = url
        self._path = file_of(url)
        self._lock = None if self._path is None else FileLock(self._path.with_name(f"{self._path.name}.lock"))
        self._engine: AsyncEngine | None = None

    @override
    def take(self) -> AsyncEngine:
        if self._path is not None and self._lock is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            make_private(self._path)
        self._engine = SqliteEngine(self.url)
        return self._engine

    @override
    async def mark(self, connection: AsyncConnection) -> None:
        pass  # The lock file is the only mark.

    @override
    async def beat(self, connection: AsyncConnection) -> bool:
        return False

    @override
    async def release(self) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await engine.dispose()
        if self._lock is not None:
            self._lock.release()

    @override
    def explain(self, error: Exception) -> str:
        # SQLite's messages name tables and columns, never values.
        return f"{self.url.database}: {error}"
