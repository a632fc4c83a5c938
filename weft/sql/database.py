"""Opening a database: SQLite's settings, and errors as one sentence for a terminal: what is wrong, what to do."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

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


def make_private(path: Path) -> None:
    """Create the file for its owner's eyes only: it holds secrets. SQLite's side files inherit its mode."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def tame(engine: AsyncEngine) -> None:
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
