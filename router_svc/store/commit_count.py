"""Loss detection for a router's SQLite database: commits are counted in the database and in a promise file beside it.

A database without its last transactions (a damaged write-ahead log, an emptied file, an older copy) looks intact. Each
commit is counted in the database and noted in the promise file before it is acknowledged; a start compares the two.

The file is written to the page cache, which survives a kill of the router, and flushed to disk within FLUSH_SECONDS. So
losing commits acknowledged in the last FLUSH_SECONDS before a power cut may go unnoticed; earlier losses are detected.
"""

import json
import os
import threading
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from router_svc.policy.lost_commits import CommitCount, Loss, loss_in
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.file_replacement import replace_file
from weft.kernel.telemetry.log import get_logger
from weft.kernel.values.names import new_id
from weft.sql.connections import Row, Tx
from weft.sql.statements import upsert
from weft.sql.store import CommitCounter

log = get_logger("weft.router.store")

FLUSH_SECONDS = 1.0
RECORD_BYTES = 256
"""Bytes of the single padded record; below a sector, so that a power cut leaves the old or the new one."""
LOSS_SUFFIX = ".loss.json"
MAX_LOSS_BYTES = 4096
STORE_PREFIX = "store"
_COUNT = "UPDATE promises SET commits = commits + 1 WHERE id = 1 RETURNING store_id, commits"
_PUT = upsert("promises", "id", "store_id", "commits")


class CommitCountFile:
    """The file of the router that owns the database. Life cycle: `read`, `open`, `note` per commit, `close`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._flush: threading.Timer | None = None
        self._turn = threading.Lock()
        """Guards the descriptor, as flushes run in a separate thread."""

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    @property
    def loss_path(self) -> Path:
        """The file that reports a loss to the operator."""
        return self._path.with_name(f"{self._path.name}{LOSS_SUFFIX}")

    def read(self) -> CommitCount | None:
        """Returns the promise of an earlier process; None: there is none, or it is unreadable, which is logged."""
        try:
            text = self._path.read_bytes()[:RECORD_BYTES]
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("the record of acknowledgements cannot be read", path=str(self._path), why=error.strerror)
            return None
        try:
            found: Any = json.loads(text)
            return CommitCount(store_id=str(found["store_id"]), commits=int(found["commits"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            log.warning("the record of acknowledgements is damaged, starting a new one", path=str(self._path))
            return None

    def notice(self) -> str:
        """Returns the notice of a loss for users and operators; empty: none is known."""
        try:
            report: Any = json.loads(self.loss_path.read_bytes()[:MAX_LOSS_BYTES])
            what, noticed_at = str(report["what"]), str(report["noticed_at"])
        except FileNotFoundError:
            return ""
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            what, noticed_at = "acknowledged work was missing from the router's database", "at an earlier start"
        return (
            f"{what} (noticed {noticed_at}): tasks, batches, files and answers acknowledged in them are lost, and "
            "tasks that had ended may be begun again"
        )

    @property
    def remedy(self) -> str:
        """What an operator can do about the notice."""
        return (
            "stop the mesh and put the newest copy of the database back together with its -wal file, or send again "
            f"what is missing; then delete {self.loss_path}"
        )

    def open(self, promise: CommitCount) -> None:
        """Opens the file with this promise. Raises OSError."""
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.truncate(self._descriptor, RECORD_BYTES)
        self._write(promise)
        os.fsync(self._descriptor)

    def note(self, promise: CommitCount) -> None:
        """Writes a promise that is about to be acknowledged. Raises OSError."""
        with self._turn:
            self._write(promise)
            if self._flush is None:
                self._flush = threading.Timer(FLUSH_SECONDS, self._flush_now)
                self._flush.daemon = True
                self._flush.start()

    def close(self) -> None:
        """Flushes and closes the file. Safe to call twice."""
        with self._turn:
            if self._flush is not None:
                self._flush.cancel()
                self._flush = None
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.fsync(descriptor)
            os.close(descriptor)

    def write_loss(self, loss: Loss, noticed_at: str) -> None:
        """Writes the loss report beside this file. Raises OSError."""
        report = {
            "noticed_at": noticed_at,
            "kind": loss.kind.value,
            "what": loss.message,
            "promised": {"store_id": loss.promised.store_id, "commits": loss.promised.commits},
            "found": {"store_id": loss.found.store_id, "commits": loss.found.commits},
        }
        replace_file(self.loss_path, f"{json.dumps(report, indent=2)}\n".encode())

    def _write(self, promise: CommitCount) -> None:
        assert self._descriptor is not None, "it is open"
        record = json.dumps({"store_id": promise.store_id, "commits": promise.commits}).encode()
        os.pwrite(self._descriptor, record.ljust(RECORD_BYTES - 1) + b"\n", 0)

    def _flush_now(self) -> None:
        with self._turn:
            self._flush = None
            own = None if self._descriptor is None else os.dup(self._descriptor)
        if own is not None:
            try:
                os.fsync(own)
            except OSError as error:
                log.warning("the record of acknowledgements is not on disk", why=error.strerror)
            finally:
                os.close(own)


class Promises(CommitCounter):
    """The promise of a database file. Life cycle: `begin`; `require_queue_room`, `count`, `keep` around each commit."""

    def __init__(self, database: Path, kept: Path) -> None:
        """`kept`: path of the promise file."""
        self._database = database
        self.file = CommitCountFile(kept)
        self._place: tuple[int, int] | None = None
        self._is_gone = False
        self._counted: CommitCount | None = None
        self.loss: Loss | None = None

    def begin(self, tx: Tx) -> None:
        """Compares the counts; stores the one to continue from if it differs. Raises OSError."""
        row = tx.row("SELECT store_id, commits FROM promises")
        found = CommitCount(store_id=new_id(STORE_PREFIX), commits=0) if row is None else _promise_of(row)
        promised = self.file.read()
        self.loss = loss_in(found, promised)
        if self.loss is not None:
            self._report(self.loss)
            # Continue from the promised count. If the newer copy were restored later, it would be the one that lacks
            # commits.
            found = CommitCount(store_id=found.store_id, commits=max(found.commits, self.loss.promised.commits))
        self.file.open(found)
        self._place = _place_of(self._database)
        if row is None or found != _promise_of(row):
            tx.execute(_PUT, id=1, store_id=found.store_id, commits=found.commits)

    def require_queue_room(self) -> None:
        """Raises SERVICE_UNAVAILABLE if the database file was removed or replaced, as writes to it would be lost."""
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

    def count(self, tx: Tx) -> None:
        """Counts a transaction."""
        self._counted = _promise_of(tx.row(_COUNT))

    def keep(self) -> None:
        """Records a committed transaction before it is acknowledged. Raises SERVICE_UNAVAILABLE if that fails."""
        self.require_queue_room()
        assert self._counted is not None, "it was counted"
        try:
            self.file.note(self._counted)
        except OSError as error:
            raise WeftError(
                Reason.SERVICE_UNAVAILABLE,
                f"{self.file.path} cannot be written: {error.strerror}; free some space on its disk",
                retry_after_seconds=1.0,
            ) from error

    def _report(self, loss: Loss) -> None:
        log.error(
            "acknowledged work is missing from the database",
            kind=loss.kind.value,
            missing_commits=loss.missing_commits,
            report=str(self.file.loss_path),
        )
        self.file.write_loss(loss, datetime.now(UTC).isoformat(timespec="seconds"))


def _promise_of(row: Row) -> CommitCount:
    return CommitCount(store_id=row.store_id, commits=row.commits)


def _place_of(path: Path) -> tuple[int, int] | None:
    """Returns device and inode of a file; None: it does not exist."""
    try:
        found = os.stat(path)  # noqa: PTH116 - called twice per commit
    except OSError:
        return None
    return found.st_dev, found.st_ino
