"""What a router's SQLite database has promised: counted in the database, and kept apart from it.

A database that comes back without its last transactions (a damaged write-ahead log, an emptied file, an earlier copy)
looks whole. It counts its own transactions, the count is noted apart before each is acknowledged, and a start compares
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
    """Of one database file. Life cycle: `begin`, then `changes`, `count` and `keep` around each write, `end`."""

    def __init__(self, database: Path, kept: Path) -> None:
        """`kept`: the file apart."""
        self._database = database
        self._file = PromiseFile(kept)
        self._place: tuple[int, int] | None = None
        self._is_gone = False
        self.loss: Loss | None = None
        """What was missing at the start."""

    @property
    def notice(self) -> str:
        """See PromiseFile.notice."""
        return self._file.notice()

    @property
    def remedy(self) -> str:
        """See PromiseFile.remedy."""
        return self._file.remedy

    async def begin(self, reading: AsyncConnection) -> Promise | None:
        """Compare; what the database has to be told with `write_found`, None: nothing. Raises OSError."""
        row = (await reading.execute(select(promises))).first()
        found = Promise(store_id=new_id(STORE_PREFIX), commits=0) if row is None else _promise_of(row)
        promised = self._file.read()
        self.loss = loss_in(found, promised)
        if self.loss is not None:
            self._tell(self.loss)
            # The count goes on behind the promise: the newer copy, were it put back later, would be the one that lacks
            # what is acknowledged from now on.
            found = Promise(store_id=found.store_id, commits=max(found.commits, self.loss.promised.commits))
        self._file.open(found)
        self._place = _place_of(self._database)
        return found if row is None or found != _promise_of(row) else None

    async def end(self) -> None:
        """Everything noted is on disk. Safe to call twice."""
        await self._file.close()

    def require_place(self) -> None:
        """Raises SERVICE_UNAVAILABLE where the file is not where it was opened: what is written to it is gone."""
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
        """The transaction with this count is on disk, and is about to be acknowledged. Raises as `require_place`."""
        self.require_place()
        self._file.note(promise)

    def _tell(self, loss: Loss) -> None:
        log.error(
            "acknowledged work is missing from the database",
            kind=loss.kind.value,
            missing_commits=loss.missing_commits,
            word=str(self._file.loss_path),
        )
        self._file.write_down(loss, datetime.now(UTC).isoformat(timespec="seconds"))


async def write_found(connection: AsyncConnection, promise: Promise) -> None:
    """Have the database say so from now on."""
    values = {"store_id": promise.store_id, "commits": promise.commits}
    if not (await connection.execute(update(promises).where(promises.c.id == _ROW).values(values))).rowcount:
        await connection.execute(insert(promises).values(id=_ROW, **values))


async def count(connection: AsyncConnection) -> Promise:
    """One transaction more, as part of it."""
    # Past SQLAlchemy, which takes four turns of the database's thread for it: this is a part of every commit.
    try:
        ((store_id, commits),) = await _driver_of(connection).execute_fetchall(_COUNT)
    except sqlite3.Error as error:
        raise DBAPIError(_COUNT, None, error) from error
    return Promise(store_id=store_id, commits=commits)


def changes(connection: AsyncConnection) -> int:
    """How many rows the connection has changed so far."""
    return int(_driver_of(connection).total_changes)


def _driver_of(connection: AsyncConnection) -> Any:
    """SQLite's own connection, as `aiosqlite` has it."""
    sync = connection.sync_connection
    assert sync is not None, "it is open"
    return sync.connection.driver_connection


def _promise_of(row: Row[Any]) -> Promise:
    return Promise(store_id=row.store_id, commits=row.commits)


def _place_of(path: Path) -> tuple[int, int] | None:
    """Which file it is; None: there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - twice for each commit
    except OSError:
        return None
    return found.st_dev, found.st_ino
