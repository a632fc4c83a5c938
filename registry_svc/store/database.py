"""The registry's database, SQLite or PostgreSQL: ownership by one registry, engine, and transactions."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import URL, Column, Connection, delete, event, insert, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from typing_extensions import override

from registry_svc.store.schema import SCHEMA, ownership
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.file_lock import lock_file
from weft.kernel.log import get_logger
from weft.kernel.missing_package import missing_package
from weft.kernel.names import new_id
from weft.kernel.reasons import Reason
from weft.sql.database import SqliteEngine, code_of, file_of, make_private, opening, require_whole
from weft.sql.schema import bring_up_to_date
from weft.sql.write_check import write_nothing

log = get_logger("weft.registry.store")


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

    def take(self) -> AsyncEngine:
        """Take ownership at the latest with the engine's first connection; raises ALREADY_EXISTS when it is taken."""
        ...

    def require_whole(self, connection: Connection) -> None:
        """Raise the error that `weft.sql.database` explains when the database is damaged, as far as that is checked."""
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


class RegistryDatabase:
    """The registry's database: opened with ownership and the newest schema, and used one transaction at a time.

    One registry owns the database: see SqliteDatabase and PostgresDatabase for how. Raises INVALID_ARGUMENT when
    `database_url` is of a kind that is not supported.
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
            raise WeftError(
                Reason.ALREADY_EXISTS,
                "another registry runs on this database; stop it, or give this one a database of its own",
            ) from error
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
    def require_whole(self, connection: Connection) -> None:
        require_whole(connection, self.url)

    @override
    async def mark(self, connection: AsyncConnection) -> None:
        pass  # The lock file is the only mark.

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


# Advisory locks are per database and identified by a 64-bit number. Other programs may use some in the same database,
# so this one is derived from a unique name.
LOCK_KEY = int.from_bytes(hashlib.sha256(b"weft.registry.store.owner").digest()[:8], "big", signed=True)
# A registry that was killed a moment ago, or the connection that just broke, may hold the lock a little longer.
LOCK_WAIT_MS = 1_000
CONNECT_TIMEOUT_SECONDS = 10.0
STATEMENT_TIMEOUT_SECONDS = 30.0
# The registry writes one transaction at a time; longer waits for the connection fail.
CONNECTION_WAIT_SECONDS = 30.0
CLOSE_TIMEOUT_SECONDS = 2.0
SERVER_SETTINGS = {
    "application_name": "weft-registry",
    # Acknowledged changes are on disk, also where the server's default is weaker.
    "synchronous_commit": "on",
    # The lock of a machine that vanished is free after about a minute; the server's default is two hours.
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}
# SQLSTATE class 22: values of the wrong form. Such messages quote the value.
_DATA_EXCEPTION_CLASS = "22"


class PostgresDatabase(Database):
    """PostgreSQL, owned by an advisory lock on the one connection that everything goes through.

    Guaranteed: every transaction of the store runs on a connection that holds the lock, so two registries never write
    to one database at once. A connection that breaks takes the lock with it and leaves its transaction undone; the next
    call opens a new connection, takes the lock again, and reads in `ownership` whether another registry was here in
    between. If one was, this registry's memory no longer matches the database, and it writes nothing until it is
    restarted.

    Not guaranteed: a connection may break after COMMIT was sent and before it was acknowledged. The caller gets
    SERVICE_UNAVAILABLE then, and the write is there either completely or not at all. The lock belongs to a session of
    the server, so a proxy in between must not share sessions (pgbouncer: `pool_mode = session`).
    """

    def __init__(self, url: URL) -> None:
        try:
            driver = import_module("asyncpg")
        except ImportError as error:
            raise invalid_field("database_url", missing_package("PostgreSQL needs", "asyncpg")) from error
        self.driver_errors: tuple[type[Exception], ...] = (
            driver.PostgresError,
            driver.InterfaceError,
            driver.InternalClientError,
        )
        self._lock_not_available: type[Exception] = driver.LockNotAvailableError
        self.url = url
        self._engine: AsyncEngine | None = None
        self._connection: Any | None = None
        """The driver's connection that holds the lock, or held it last."""
        self._owner: str | None = None
        """The id that this registry wrote into `ownership`; None until then."""

    @override
    def take(self) -> AsyncEngine:
        self._engine = create_async_engine(
            self.url,
            hide_parameters=True,
            pool_size=1,
            max_overflow=0,
            pool_timeout=CONNECTION_WAIT_SECONDS,
            pool_pre_ping=True,
            connect_args={
                "timeout": CONNECT_TIMEOUT_SECONDS,
                "command_timeout": STATEMENT_TIMEOUT_SECONDS,
                "server_settings": SERVER_SETTINGS,
            },
        )

        @event.listens_for(self._engine.sync_engine, "connect")
        def claim(connection: Any, _record: object) -> None:
            connection.run_async(self._claim)

        return self._engine

    @override
    def require_whole(self, connection: Connection) -> None:
        pass  # The server checks its own files.

    @override
    async def mark(self, connection: AsyncConnection) -> None:
        owner = new_id("own")
        await connection.execute(delete(ownership))
        await connection.execute(insert(ownership), {"id": 1, "owner": owner})
        self._owner = owner

    @override
    async def release(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            # Closing alone frees the lock too, but only when the server notices; the next owner may be quicker.
            with suppress(*self.driver_errors, OSError):
                await connection.execute("SELECT pg_advisory_unlock_all()", timeout=CLOSE_TIMEOUT_SECONDS)
        self._owner = None
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await engine.dispose()

    @override
    def explain(self, error: Exception) -> str:
        # The driver's own text would quote the rows that the statement was about.
        cause = _driver_error(error)
        sqlstate = str(getattr(cause, "sqlstate", None) or "")
        text = f": {cause.args[0]}" if sqlstate and not sqlstate.startswith(_DATA_EXCEPTION_CLASS) else ""
        if isinstance(cause, OSError):
            text = f": {cause}"
        shown_url = self.url.set(query={}).render_as_string(hide_password=True)
        return f"{shown_url}: {type(cause).__name__} {sqlstate}{text}"

    async def _claim(self, connection: Any) -> None:
        """Take the lock on a new connection, and check that no other registry owned the database meanwhile."""
        try:
            await self._lock(connection)
            await self._require_own(connection)
        except BaseException:
            # The pool does not know the connection yet, so it would not close it.
            connection.terminate()
            raise
        self._connection = connection

    async def _lock(self, connection: Any) -> None:
        try:
            async with connection.transaction():
                await connection.execute(f"SET LOCAL lock_timeout = {LOCK_WAIT_MS}")
                # Of the session, not of the transaction: it outlives this block.
                await connection.fetchval("SELECT pg_advisory_lock($1)", LOCK_KEY)
        except self._lock_not_available:
            if self._owner is None:
                raise WeftError(
                    Reason.ALREADY_EXISTS,
                    "another registry runs on this database; stop it, or give this one a database of its own",
                ) from None
            raise WeftError(
                Reason.SERVICE_UNAVAILABLE,
                "the registry lost its hold on the database, and its old connection or another registry still has it",
            ) from None

    async def _require_own(self, connection: Any) -> None:
        if self._owner is None:
            return
        if await connection.fetchval("SELECT owner FROM ownership") != self._owner:
            raise WeftError(
                Reason.SERVICE_UNAVAILABLE, "another registry has taken over this database; stop or restart this one"
            )


def _driver_error(error: Exception) -> BaseException:
    """The innermost cause: SQLAlchemy wraps its adapter's error, and that the driver's."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return cause
