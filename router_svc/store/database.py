"""A router's database: SQLite beside it, or PostgreSQL, which several routers may share."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import URL, make_url, text
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from router_svc.policy.promises import Loss
from router_svc.store.promises import Promises, changes, count, write_found
from router_svc.store.tables import SCHEMA
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft.sql.opening import code_of, opening, require_whole
from weft.sql.schema import bring_up_to_date
from weft.sql.sqlite import WRITES, file_of, make_private, tame

log = structlog.get_logger("weft.router.store")

MAX_POSTGRES_CONNECTIONS = 8
CONNECTION_WAIT_SECONDS = 10.0
CONNECT_TIMEOUT_SECONDS = 10.0
STATEMENT_TIMEOUT_SECONDS = 30.0
IDLE_TRANSACTION_TIMEOUT_SECONDS = 30.0
"""After which PostgreSQL ends a transaction whose router has stopped in the middle: others may wait for its rows."""
# Drawn from a name nobody else has: migrations of two routers that start together take turns.
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
    """Shared by all who keep something in it: each opens it, and the last one's close closes it.

    Raises INVALID_ARGUMENT for a URL of no kind that is supported.
    """

    def __init__(self, database_url: str, *, promise_file: Path | None = None) -> None:
        """`promise_file`: where it is kept apart what was acknowledged; for SQLite in a file alone."""
        self._url = _parsed(database_url)
        self._is_sqlite = self._url.drivername == _SQLITE
        path = file_of(self._url) if self._is_sqlite else None
        self._promises = None if path is None or promise_file is None else Promises(path, promise_file)
        self._engine: AsyncEngine | None = None
        self._users = 0
        self._opening = asyncio.Lock()
        # Of those who write to SQLite; one at a time may, and whoever waits here can be cancelled.
        self._turn = asyncio.Lock()

    @property
    def is_shared(self) -> bool:
        """Whether other routers may write to it, too."""
        return not self._is_sqlite

    @property
    def loss(self) -> Loss | None:
        """What it lacked of what was acknowledged, when it was opened; None: nothing, or nobody knows."""
        return None if self._promises is None else self._promises.loss

    @property
    def notice(self) -> str:
        """What users and whoever looks after the mesh must know of it; empty: nothing. Reads a small file."""
        return "" if self._promises is None else self._promises.notice

    @property
    def remedy(self) -> str:
        """What can be done about what `notice` says."""
        return "" if self._promises is None else self._promises.remedy

    async def open(self) -> None:
        """Connect, and bring the schema up to date, unless that is done. Raises SERVICE_UNAVAILABLE."""
        async with self._opening:
            if not self._users:
                await self._begin()
            self._users += 1

    async def close(self) -> None:
        """One user less. Safe to call when nobody has opened it."""
        async with self._opening:
            self._users = max(0, self._users - 1)
            if not self._users:
                await self._end()

    async def _begin(self) -> None:
        try:
            with opening(SCHEMA.owner, self._url):
                self._engine = self._connect()
                # Where there is nothing to bring up to date this only reads: a backup under way does not stop a start.
                await self._bring_up_to_date()
                await self._compare()
        except BaseException:
            await self._end()
            raise

    async def _end(self) -> None:
        if self._promises is not None:
            await self._promises.end()
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await engine.dispose()

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """One transaction, on disk when its block has been left. Raises SERVICE_UNAVAILABLE when the database fails."""
        engine = self._opened()
        with _explained():
            if self._promises is not None:
                async with self._promised(engine, self._promises) as connection:
                    yield connection
            elif self._is_sqlite:
                async with self._turn, engine.execution_options(**{WRITES: True}).begin() as connection:
                    yield connection
            else:
                async with engine.begin() as connection:
                    yield connection

    @asynccontextmanager
    async def _promised(self, engine: AsyncEngine, promises: Promises) -> AsyncIterator[AsyncConnection]:
        """A transaction that is counted where it changes anything, and noted before it is acknowledged."""
        promises.require_place()
        promise = None
        async with self._turn, engine.execution_options(**{WRITES: True}).begin() as connection:
            before = changes(connection)
            yield connection
            if changes(connection) != before:
                promise = await count(connection)
        if promise is not None:
            promises.keep(promise)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """One transaction that only reads: it waits for no writer. Raises as `writing`."""
        engine = self._opened()
        # All users of a database in memory share one connection.
        turn = self._turn if self._is_sqlite and file_of(self._url) is None else nullcontext()
        with _explained():
            async with turn, engine.begin() as connection:
                yield connection

    @asynccontextmanager
    async def apart(self) -> AsyncIterator[AsyncConnection]:
        """A connection to PostgreSQL beside those of the pool, for whoever keeps one. Raises SERVICE_UNAVAILABLE."""
        self._opened()
        engine = create_async_engine(self._url, hide_parameters=True, poolclass=NullPool, **_POSTGRES_OPTIONS)
        try:
            with _explained():
                async with engine.connect() as connection:
                    yield connection
        finally:
            await engine.dispose()

    async def _bring_up_to_date(self) -> None:
        async with self._turn, self._opened().begin() as connection:
            if not self._is_sqlite:
                await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
            else:
                await connection.run_sync(require_whole, self._url)
            await connection.run_sync(bring_up_to_date, SCHEMA)

    async def _compare(self) -> None:
        """Find out what the database lacks of what was promised with it."""
        if self._promises is None:
            return
        async with self._opened().begin() as connection:
            unsaid = await self._promises.begin(connection)
        if unsaid is not None:
            async with self._opened().execution_options(**{WRITES: True}).begin() as connection:
                await write_found(connection, unsaid)

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
            engine = create_async_engine(self._url, hide_parameters=True)
            tame(engine)
            return engine
        if find_spec("asyncpg") is None:
            raise invalid_field("database_url", "PostgreSQL needs the package asyncpg; pip install 'weft[postgres]'")
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
def _explained() -> Iterator[None]:
    try:
        yield
    except (SQLAlchemyError, OSError) as error:
        # The driver's own text may quote what was written; its code does not.
        log.error("the database failed", kind=type(error).__name__, code=code_of(error))  # noqa: TRY400
        raise WeftError(
            Reason.SERVICE_UNAVAILABLE, "the router's database failed; its log says how", retry_after_seconds=1
        ) from error


def _parsed(database_url: str) -> URL:
    # Not chained: the causes quote the URL or parts of it, and in it may be a password.
    try:
        url = make_url(database_url)
    except (ArgumentError, ValueError):
        raise invalid_field("database_url", "must be a URL such as postgresql+asyncpg://user@host/weft") from None
    if url.drivername not in (_SQLITE, _POSTGRES):
        raise invalid_field("database_url", f"must begin with {_SQLITE}:// or {_POSTGRES}://")
    return url
