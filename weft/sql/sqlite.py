"""SQLite, tuned for commits that stay."""

import os
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, event
from sqlalchemy.ext.asyncio import AsyncEngine

from weft.kernel.errors import invalid_field

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
