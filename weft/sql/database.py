"""Opening a database: SQLite's settings, and errors as one sentence for a terminal: what is wrong, what to do."""

import asyncio
import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiosqlite
from sqlalchemy import URL, Connection, event, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from typing_extensions import override

from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason

log = get_logger("weft.sql")

MAX_CHECKED_BYTES = 256 * 1024 * 1024
"""A larger file is opened without the check of its structure, which reads all of it."""
_RESTORE = "restore it from a backup, or move it away to begin with an empty one"
_FULL = "free some space on its disk"
_ACCESS = "let this user read and write it and its folder, or choose another home"
_CONNECT = "check that it is there and takes connections"
_REMEDIES = {
    "SQLITE_NOTADB": ("is no database", _RESTORE),
    "SQLITE_CORRUPT": ("is damaged", _RESTORE),
    "SQLITE_FULL": ("cannot be written", _FULL),
    "SQLITE_IOERR": ("cannot be read or written", "look at its disk: it may be full or failing"),
    "SQLITE_READONLY": ("is read-only", _ACCESS),
    "SQLITE_CANTOPEN": ("cannot be opened", _ACCESS),
    "SQLITE_PERM": ("cannot be opened", _ACCESS),
    "SQLITE_BUSY": ("is locked by another program", "end that program"),
}
_FULL_NUMBERS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DamagedError(SQLAlchemyError):
    """The structure of a database file is broken."""


@contextmanager
def opening(owner: str, url: URL, driver_errors: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Raise SERVICE_UNAVAILABLE, with a text for a terminal, in place of what the database raises in the block.

    `owner`: the service whose database it is. `driver_errors`: exceptions of its driver that SQLAlchemy does not wrap.
    """
    failures: tuple[type[Exception], ...] = (SQLAlchemyError, OSError, *driver_errors)
    try:
        yield
    except failures as error:
        code, shown = code_of(error), url.set(query={}).render_as_string(hide_password=True)
        kind = type(error).__name__
        log.error("the database cannot be opened", owner=owner, url=shown, kind=kind, code=code)  # noqa: TRY400
        # Not chained: the driver's errors may quote rows, and a URL a password.
        raise WeftError(Reason.SERVICE_UNAVAILABLE, _words(owner, url, error, code)) from None
    except WeftError as error:
        raise WeftError(error.reason, f"{_place(owner, url)}: {error.message}", metadata=error.metadata) from error


def require_whole(connection: Connection, url: URL) -> None:
    """Raise DamagedError, or what SQLite raises, for a file of up to MAX_CHECKED_BYTES with a broken structure."""
    path = file_of(url)
    if path is None or path.stat().st_size > MAX_CHECKED_BYTES:
        return
    found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
    if found != "ok":
        raise DamagedError(str(found))


def code_of(error: Exception) -> str:
    """Return the database's code of a failure: SQLITE_FULL, an SQLSTATE of PostgreSQL, or the system's error number."""
    if isinstance(error, DamagedError):
        return "SQLITE_CORRUPT"
    cause = getattr(error, "orig", None) or error
    names = (getattr(cause, name, None) for name in ("sqlite_errorname", "sqlstate", "errno"))
    return str(next((name for name in names if name), type(cause).__name__))


def _words(owner: str, url: URL, error: Exception, code: str) -> str:
    if isinstance(error, OSError):
        remedy = _FULL if error.errno in _FULL_NUMBERS else _ACCESS
        if not _is_file(url):
            remedy = _CONNECT
        return f"{_place(owner, url)} cannot be used: {error.strerror or code}; {remedy}"
    family = "_".join(code.split("_")[:2])
    what, remedy = _REMEDIES.get(family, ("cannot be used", _CONNECT))
    return f"{_place(owner, url)} {what} ({code}); {remedy}"


def _is_file(url: URL) -> bool:
    return url.get_backend_name() == "sqlite"


def _place(owner: str, url: URL) -> str:
    where = file_of(url) if _is_file(url) else f"{url.host or 'localhost'}/{url.database or ''}"
    return f"the {owner}'s database {where or 'in memory'}"


BUSY_TIMEOUT_MS = 5_000
SQLITE_DRIVER = "sqlite+aiosqlite"
CLOSE_WAIT_SECONDS = 6.0
"""Longest wait for the threads of connections; a statement that waits for a lock takes BUSY_TIMEOUT_MS."""
WRITES = "weft_writes"
"""Execution option of an engine whose transactions take the write lock when they begin: a transaction that has read
already cannot wait for the lock, and fails at once while another program, such as a backup, holds it."""


def file_of(url: URL) -> Path | None:
    """The file behind `url`; None for a database in memory. Raises INVALID_ARGUMENT for a `file:` URI."""
    if url.database in {None, "", ":memory:"}:
        return None
    name = str(url.database)
    if name.startswith("file:"):
        raise invalid_field("database_url", "SQLite's file: form is not supported, name the file by its path")
    return Path(name)


def url_of(database: str | Path) -> URL:
    """Returns the URL of a SQLite file, or of a URL as text. Raises SQLAlchemy's ArgumentError, or ValueError.

    In a text, a `?` of a path begins the URL's parameters.
    """
    return make_url(database) if isinstance(database, str) else URL.create(SQLITE_DRIVER, database=str(database))


def make_private(path: Path) -> None:
    """Create the file for its owner's eyes only: it holds secrets. SQLite's side files inherit its mode."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


_FETCHED_ROWS = 64
"""aiosqlite's own default: rows that an iteration over a cursor fetches at once."""


class SqliteConnection(aiosqlite.Connection):
    """aiosqlite's connection, closed by its thread after what it has begun; `stop` and `close` may be called twice.

    SQLAlchemy closes the connection of a cancelled transaction, and stops it beside that if the close is cancelled too.
    aiosqlite then forgets to close the file, which stays locked, or waits for an answer of a thread that has ended, and
    the event loop of the process never closes.
    """

    _stopped: asyncio.Future[Any] | None = None
    siblings: "set[SqliteConnection]"
    """The connections of the same engine, this one included until it is closed."""

    @override
    def stop(self) -> asyncio.Future[Any] | None:
        if self._stopped is None:
            # A close leaves the transaction, and with it the lock of the file, to cursors that something refers to.
            self._tx.put_nowait((None, self._roll_back))
            self._stopped = super().stop()
            if self._stopped is not None:
                self._stopped.add_done_callback(lambda _: self.siblings.discard(self))
        return self._stopped

    @override
    async def close(self) -> None:
        stopped = self.stop()
        if stopped is not None:
            await asyncio.shield(stopped)

    def _roll_back(self) -> None:
        if self._connection is not None and self._connection.in_transaction:
            self._connection.rollback()


class SqliteEngine(AsyncEngine):
    """The engine of an SQLite database, which knows its connections."""

    __slots__ = ("_connections",)

    def __init__(self, url: URL) -> None:
        self._connections: set[SqliteConnection] = set()
        options = {"async_creator_fn": self._connect}
        super().__init__(create_async_engine(url, hide_parameters=True, connect_args=options).sync_engine)
        _configure(self)

    @override
    async def dispose(self, close: bool = True) -> None:
        """Closes every connection, those in use as well, and waits for their threads, at most CLOSE_WAIT_SECONDS.

        A thread that outlives the event loop would fail at its next answer.
        """
        await super().dispose(close)
        stops = [stopped for connection in tuple(self._connections) if (stopped := connection.stop()) is not None]
        if stops:
            await asyncio.wait(stops, timeout=CLOSE_WAIT_SECONDS)

    def _connect(self, database: str, **options: Any) -> SqliteConnection:
        connection = SqliteConnection(partial(sqlite3.connect, database, **options), _FETCHED_ROWS)
        # As SQLAlchemy does with connections that it makes: a process may end while one is open.
        connection._thread.daemon = True  # noqa: SLF001
        # Kept here as well: SQLAlchemy drops one whose opening is cancelled at its end.
        self._connections.add(connection)
        connection.siblings = self._connections
        return connection


def _configure(engine: AsyncEngine) -> None:
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
            # Deleted rows are overwritten in the file: they may hold secrets.
            "secure_delete=ON",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get(WRITES) else "BEGIN")
