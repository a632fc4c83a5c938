"""Loss detection for a router's SQLite database: commits are counted inside it and in a promise file beside it.

A database without its last transactions (a damaged write-ahead log, an emptied file, an older copy) looks intact. It
counts its own commits, each count is noted in the promise file before the commit is acknowledged, and a start compares
the two.
"""

import os
import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import Row, insert, select, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from router_svc.policy.promises import Loss, Promise, loss_in
from router_svc.store.promise_file import PromiseFile
from router_svc.store.tables import promises
from weft.kernel.errors import WeftError
from weft.kernel.names import new_id
from weft.kernel.reasons import Reason

log = structlog.get_logger("weft.router.store")

STORE_PREFIX = "store"
_ROW = 1
_COUNT = "UPDATE promises SET commits = commits + 1 WHERE id = 1 RETURNING store_id, commits"


class Promises:
    """The promise of one database file. Life cycle: `begin`; `changes`, `count`, `keep` around each write; `end`."""

    def __init__(self, database: Path, kept: Path) -> None:
        """`kept`: path of the promise file."""
        self._database = database
        self._file = PromiseFile(kept)
        self._place: tuple[int, int] | None = None
        self._is_gone = False
        self.loss: Loss | None = None
        """The loss that was found at the start."""

    @property
    def notice(self) -> str:
        """The notice of a loss for users and operators; empty: none."""
        return self._file.notice()

    @property
    def remedy(self) -> str:
        """The remedy for the notice."""
        return self._file.remedy

    async def begin(self, reading: AsyncConnection) -> Promise | None:
        """Compares the counts; returns what `write_found` must write to the database, None: nothing. Raises OSError."""
        row = (await reading.execute(select(promises))).first()
        found = Promise(store_id=new_id(STORE_PREFIX), commits=0) if row is None else _promise_of(row)
        promised = self._file.read()
        self.loss = loss_in(found, promised)
        if self.loss is not None:
            self._report(self.loss)
            # The count goes on after the promised one. If the newer copy were restored later, it would be the one that
            # lacks commits.
            found = Promise(store_id=found.store_id, commits=max(found.commits, self.loss.promised.commits))
        self._file.open(found)
        self._place = _place_of(self._database)
        return found if row is None or found != _promise_of(row) else None

    async def end(self) -> None:
        """Flushes the promise file. Safe to call twice."""
        await self._file.close()

    def require_place(self) -> None:
        """Raises SERVICE_UNAVAILABLE if the database file was removed or replaced, because writes to it are lost."""
        is_gone = _place_of(self._database) != self._place
        if is_gone and not self._is_gone:
            log.error("the database file was removed or replaced", path=str(self._database))
        self._is_gone = is_gone
        if is_gone:
            raise WeftError(
                Reason.SERVICE_UNAVAILABLE,
                f"the router's database {self._database} was removed or replaced while the router runs, so nothing is "
                "accepted that must be kept; put it back, or restart the mesh",
                retry_after_seconds=1.0,
            )

    def keep(self, promise: Promise) -> None:
        """Notes a committed transaction before it is acknowledged. Raises as `require_place`."""
        self.require_place()
        self._file.note(promise)

    def _report(self, loss: Loss) -> None:
        log.error(
            "acknowledged work is missing from the database",
            kind=loss.kind.value,
            missing_commits=loss.missing_commits,
            word=str(self._file.loss_path),
        )
        self._file.write_loss(loss, datetime.now(UTC).isoformat(timespec="seconds"))


async def write_found(connection: AsyncConnection, promise: Promise) -> None:
    """Writes the promise to the database."""
    values = {"store_id": promise.store_id, "commits": promise.commits}
    if not (await connection.execute(update(promises).where(promises.c.id == _ROW).values(values))).rowcount:
        await connection.execute(insert(promises).values(id=_ROW, **values))


async def count(connection: AsyncConnection) -> Promise:
    """Counts the current transaction, as a part of it."""
    # Directly on the driver: SQLAlchemy needs four switches to the database thread, and this runs in every commit.
    try:
        ((store_id, commits),) = await _driver_of(connection).execute_fetchall(_COUNT)
    except sqlite3.Error as error:
        raise DBAPIError(_COUNT, None, error) from error
    return Promise(store_id=store_id, commits=commits)


def changes(connection: AsyncConnection) -> int:
    """Returns how many rows the connection has changed so far."""
    return int(_driver_of(connection).total_changes)


def _driver_of(connection: AsyncConnection) -> Any:
    """Returns the aiosqlite connection."""
    sync = connection.sync_connection
    assert sync is not None, "it is open"
    return sync.connection.driver_connection


def _promise_of(row: Row[Any]) -> Promise:
    return Promise(store_id=row.store_id, commits=row.commits)


def _place_of(path: Path) -> tuple[int, int] | None:
    """Returns device and inode of a file; None: there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - called twice per commit
    except OSError:
        return None
    return found.st_dev, found.st_ino
