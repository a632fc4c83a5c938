"""A router's database: a local SQLite file, or PostgreSQL, where one router leads and others stand by."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Executable, Row, literal, select, text
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from router_svc.policy.promises import Loss
from router_svc.store.promises import Promises, changes, count, write_found
from router_svc.store.tables import SCHEMA, router_leader
from weft.api.operations.v1.process_service_pb2 import DatabaseSchema
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.log import get_logger
from weft.kernel.missing_package import missing_package
from weft.kernel.reasons import Reason
from weft.sql.database import WRITES, SqliteEngine, code_of, file_of, make_private, opening, require_whole, url_of
from weft.sql.schema import bring_up_to_date, schema_in
from weft.sql.write_check import write_nothing

log = get_logger("weft.router.store")

MAX_POSTGRES_CONNECTIONS = 8
CONNECTION_WAIT_SECONDS = 10.0
CONNECT_TIMEOUT_SECONDS = 10.0
STATEMENT_TIMEOUT_SECONDS = 30.0
IDLE_TRANSACTION_TIMEOUT_SECONDS = 30.0
"""PostgreSQL ends a transaction of a stopped router after this time, because others may wait for its rows."""
CLOSE_WAIT_SECONDS = 2.0
"""Longest wait of a close for transactions that are still open."""
# Key of the advisory lock that serializes the migrations of routers that start together; unique to weft.
MIGRATION_LOCK = 0x7765_6674_726F_7574
_POSTGRES_OPTIONS: Mapping[str, Any] = {
    "connect_args": {
        "timeout": CONNECT_TIMEOUT_SECONDS,
        "command_timeout": STATEMENT_TIMEOUT_SECONDS,
        "server_settings": {
            "application_name": "weft-router",
            "synchronous_commit": "on",
            "idle_in_transaction_session_timeout": f"{IDLE_TRANSACTION_TIMEOUT_SECONDS:.0f}s",
        },
    }
}
_SQLITE, _POSTGRES = "sqlite+aiosqlite", "postgresql+asyncpg"


class RouterDatabase:
    """A database that several services share: each opens it, and the last close closes it.

    Raises INVALID_ARGUMENT for a URL of an unsupported kind.
    """

    def __init__(self, database_url: str | Path, *, promise_file: Path | None = None) -> None:
        """`promise_file`: where the number of acknowledged commits is kept; used for SQLite in a file only."""
        self._url = _parsed(database_url)
        self._is_sqlite = self._url.drivername == _SQLITE
        path = file_of(self._url) if self._is_sqlite else None
        self._promises = None if path is None or promise_file is None else Promises(path, promise_file)
        self._engine: AsyncEngine | None = None
        self._users = 0
        self._opening = asyncio.Lock()
        # Serializes writers on SQLite; unlike a wait inside SQLite, waiting here can be cancelled.
        self._write_lock = asyncio.Lock()
        self._open_transactions = 0
        self.write_count = 0
        """Write transactions that have begun: while it stays the same, this process has changed nothing."""
        self._idle = asyncio.Event()
        """Set while no transaction is open."""
        self._idle.set()
        self._leader: str | None = None
        """The id under which this process leads, or led, the routers of this database; None: writes are not fenced."""

    @property
    def url(self) -> URL:
        """Where it is."""
        return self._url

    @property
    def is_shared(self) -> bool:
        """Whether other routers may open it, to stand by for this one."""
        return not self._is_sqlite

    def fence(self, leader: str | None) -> None:
        """Refuse writes from now on unless `leader` is who leads the routers of this database."""
        self._leader = leader

    @property
    def loss(self) -> Loss | None:
        """Acknowledged commits that were missing when it was opened; None: none, or unknown."""
        return None if self._promises is None else self._promises.loss

    @property
    def notice(self) -> str:
        """A notice of lost data for users and operators; empty: none. Reads a small file."""
        return "" if self._promises is None else self._promises.notice

    @property
    def remedy(self) -> str:
        """The remedy for what `notice` says."""
        return "" if self._promises is None else self._promises.remedy

    async def open(self) -> None:
        """Connects and migrates the schema, unless that is done. Raises SERVICE_UNAVAILABLE."""
        async with self._opening:
            if not self._users:
                await self._begin()
            self._users += 1

    async def close(self) -> None:
        """Removes one user; the last one disconnects. Safe to call when it is not open."""
        async with self._opening:
            self._users = max(0, self._users - 1)
            if not self._users:
                await self._end()

    async def _begin(self) -> None:
        try:
            with opening(SCHEMA.owner, self._url):
                self._engine = self._connect()
                # Without a pending migration this only reads, so that a running backup does not block a start.
                await self._migrate()
                await self._compare()
        except BaseException:
            await self._end()
            raise

    async def _end(self) -> None:
        engine, self._engine = self._engine, None
        # A connection that is in use is not closed below, and its thread would outlive the event loop.
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), CLOSE_WAIT_SECONDS)
        if self._promises is not None:
            await self._promises.end()
        if engine is not None:
            await engine.dispose()

    @contextmanager
    def _transaction(self) -> Iterator[AsyncEngine]:
        """Context of a transaction, for which a close waits. Raises SERVICE_UNAVAILABLE when the database fails."""
        engine = self._opened()
        self._open_transactions += 1
        self._idle.clear()
        try:
            with _database_errors():
                yield engine
        finally:
            self._open_transactions -= 1
            if not self._open_transactions:
                self._idle.set()

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """Context of one write transaction, on disk at its exit. Raises SERVICE_UNAVAILABLE when the database fails."""
        self.write_count += 1
        with self._transaction() as engine:
            if self._promises is not None:
                async with self._promised(engine, self._promises) as connection:
                    yield connection
            elif self._is_sqlite:
                async with self._write_lock, engine.execution_options(**{WRITES: True}).begin() as connection:
                    yield connection
            else:
                async with engine.begin() as connection:
                    await self._require_lead(connection)
                    yield connection

    async def _require_lead(self, connection: AsyncConnection) -> None:
        """Raise ROUTER_STANDBY where another router leads; until the transaction's end none can begin to."""
        if self._leader is None:
            return
        # Heartbeats go on beside this lock; the next leader deletes the row, and waits.
        own = select(literal(1)).where(router_leader.c.owner == self._leader).with_for_update(read=True, key_share=True)
        if (await connection.execute(own)).first() is None:
            raise WeftError(Reason.ROUTER_STANDBY, "another router leads; this one writes nothing any more")

    @asynccontextmanager
    async def _promised(self, engine: AsyncEngine, promises: Promises) -> AsyncIterator[AsyncConnection]:
        """A transaction that is counted if it changes anything; the count is noted before it is acknowledged."""
        promises.require_place()
        promise = None
        async with self._write_lock, engine.execution_options(**{WRITES: True}).begin() as connection:
            before = changes(connection)
            yield connection
            if changes(connection) != before:
                promise = await count(connection)
        if promise is not None:
            promises.keep(promise)

    @property
    def write_turn(self) -> asyncio.Lock:
        """Held during each transaction that writes: while another holds it, this process has none open."""
        return self._write_lock

    @property
    def known_schema(self) -> DatabaseSchema:
        """The revision of its tables as known here."""
        return DatabaseSchema(service=SCHEMA.owner, known_revision=SCHEMA.newest)

    async def schema(self) -> DatabaseSchema:
        """Returns the revision of its tables, as known here and as the database has it; empty where it is not open."""
        try:
            async with self.reading() as connection:
                return await connection.run_sync(schema_in, SCHEMA)
        except WeftError:
            return self.known_schema

    async def write_failure(self) -> str:
        """Writes without changing anything; returns the database's code of a failure, empty where it succeeds."""
        if self._engine is None:
            return "not open"
        try:
            async with self._write_lock, self._engine.execution_options(**{WRITES: True}).begin() as connection:
                await write_nothing(connection)
        except (SQLAlchemyError, OSError) as error:
            return code_of(error)
        return ""

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """Context of one read transaction, which waits for no writer. Raises as `writing`."""
        # All users of an in-memory database share one connection.
        lock = self._write_lock if self._is_sqlite and file_of(self._url) is None else nullcontext()
        with self._transaction() as engine:
            async with lock, engine.begin() as connection:
                yield connection

    async def first(self, statement: Executable, **values: object) -> Row[tuple[Any, ...]] | None:
        """Returns the first row of a read; None: there is none. Raises as `writing`."""
        async with self.reading() as connection:
            return (await connection.execute(statement, values)).first()

    async def rows(self, statement: Executable, **values: object) -> Sequence[Row[tuple[Any, ...]]]:
        """Returns the rows of a read. Raises as `writing`."""
        async with self.reading() as connection:
            return (await connection.execute(statement, values)).all()

    async def change(self, statement: Executable, **values: object) -> int:
        """Runs one statement in a write transaction of its own; returns how many rows it changed."""
        async with self.writing() as connection:
            return (await connection.execute(statement, values)).rowcount

    @asynccontextmanager
    async def dedicated(self) -> AsyncIterator[AsyncConnection]:
        """Context of a PostgreSQL connection outside the pool, for a listener. Raises SERVICE_UNAVAILABLE."""
        self._opened()
        engine = create_async_engine(self._url, hide_parameters=True, poolclass=NullPool, **_POSTGRES_OPTIONS)
        try:
            with _database_errors():
                async with engine.connect() as connection:
                    yield connection
        finally:
            await engine.dispose()

    async def _migrate(self) -> None:
        async with self._write_lock, self._opened().begin() as connection:
            if not self._is_sqlite:
                await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
            else:
                await connection.run_sync(require_whole, self._url)
            await connection.run_sync(bring_up_to_date, SCHEMA)

    async def _compare(self) -> None:
        """Compares the database with its record of acknowledged commits."""
        if self._promises is None:
            return
        async with self._opened().begin() as connection:
            unwritten = await self._promises.begin(connection)
        if unwritten is not None:
            async with self._opened().execution_options(**{WRITES: True}).begin() as connection:
                await write_found(connection, unwritten)

    def _opened(self) -> AsyncEngine:
        if self._engine is None:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the router's database is not open")
        return self._engine

    def _connect(self) -> AsyncEngine:
        if self._is_sqlite:
            path = file_of(self._url)
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                make_private(path)
            return SqliteEngine(self._url)
        if find_spec("asyncpg") is None:
            raise invalid_field("database_url", missing_package("PostgreSQL needs", "asyncpg"))
        return create_async_engine(
            self._url,
            hide_parameters=True,
            pool_size=MAX_POSTGRES_CONNECTIONS,
            max_overflow=0,
            pool_timeout=CONNECTION_WAIT_SECONDS,
            pool_pre_ping=True,
            **_POSTGRES_OPTIONS,
        )


@contextmanager
def _database_errors() -> Iterator[None]:
    try:
        yield
    except (SQLAlchemyError, OSError) as error:
        # The text of the driver may quote written data; its code does not.
        log.error("the database failed", kind=type(error).__name__, code=code_of(error))  # noqa: TRY400
        raise WeftError(
            Reason.SERVICE_UNAVAILABLE,
            "the router's database failed; the router's log has the details",
            retry_after_seconds=1,
        ) from error


def _parsed(database_url: str | Path) -> URL:
    # Not chained: the causes quote the URL, which may contain a password.
    try:
        url = url_of(database_url)
    except (ArgumentError, ValueError):
        raise invalid_field("database_url", "must be a URL such as postgresql+asyncpg://user@host/weft") from None
    if url.drivername not in (_SQLITE, _POSTGRES):
        raise invalid_field("database_url", f"must begin with {_SQLITE}:// or {_POSTGRES}://")
    return url
