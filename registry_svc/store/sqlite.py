"""SQLite: owned by a lock file beside the database, tuned for commits that stay."""

import os
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from registry_svc.store.lock import FileLock
from weft.kernel.errors import invalid_field

BUSY_TIMEOUT_MS = 5_000


class SqliteDatabase:
    """See Database. The file's lock is held by the process, so it cannot be lost while the process lives."""

    driver_errors: tuple[type[Exception], ...] = ()

    def __init__(self, url: URL) -> None:
        self._url = url
        self._path = _file_of(url)
        self._lock = None if self._path is None else FileLock(self._path.with_name(f"{self._path.name}.lock"))
        self._engine: AsyncEngine | None = None

    def take(self) -> AsyncEngine:
        """See Database.take."""
        if self._path is not None and self._lock is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            _make_private(self._path)
        self._engine = create_async_engine(self._url, hide_parameters=True)
        _tame(self._engine)
        return self._engine

    async def mark(self, connection: AsyncConnection) -> None:
        """See Database.mark: nothing, the lock says it all."""

    async def release(self) -> None:
        """See Database.release."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await engine.dispose()
        if self._lock is not None:
            self._lock.release()

    def explain(self, error: Exception) -> str:
        """See Database.explain. SQLite's own words name tables and columns, never values."""
        return f"{self._url.database}: {error}"


def _file_of(url: URL) -> Path | None:
    """The file behind `url`; None for a database in memory."""
    if url.database in {None, "", ":memory:"}:
        return None
    name = str(url.database)
    if name.startswith("file:"):
        raise invalid_field("database_url", "SQLite's file: form is not supported, name the file by its path")
    return Path(name)


def _make_private(path: Path) -> None:
    """Create the file for its owner's eyes only: it holds ticket keys. SQLite's side files inherit its mode."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _tame(engine: AsyncEngine) -> None:
    """Durable commits, readers beside the writer, foreign keys, and transactions that hold DDL too."""

    @event.listens_for(engine.sync_engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        # The driver's own BEGIN leaves DDL and SELECT outside of transactions; `begin` below does not.
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            f"busy_timeout={BUSY_TIMEOUT_MS}",
            "foreign_keys=ON",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")
