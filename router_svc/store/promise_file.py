"""The promise file: the number of acknowledged commits of a router's database, in a file beside it.

It is written after each commit and before its acknowledgement, into the page cache, which survives a kill of the
router, and flushed to disk within FLUSH_SECONDS. So a loss of commits acknowledged in the last FLUSH_SECONDS before a
power cut may go unnoticed; any earlier loss is detected.
"""

import asyncio
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from router_svc.policy.promises import Loss, Promise

log = structlog.get_logger("weft.router.store")

FLUSH_SECONDS = 1.0
RECORD_BYTES = 256
"""Bytes of the only record, padded; less than a sector, so that a power cut leaves the old or the new one."""
LOSS_SUFFIX = ".loss.json"
MAX_LOSS_BYTES = 4096


class PromiseFile:
    """The file of the one router that owns the database. Life cycle: `read`, `open`, `note` per commit, `close`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._flush: asyncio.Task[None] | None = None
        self._noted = 0

    @property
    def loss_path(self) -> Path:
        """The file that reports a loss to the operator."""
        return self._path.with_name(f"{self._path.name}{LOSS_SUFFIX}")

    def read(self) -> Promise | None:
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
            return Promise(store_id=str(found["store_id"]), commits=int(found["commits"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            log.warning("the record of acknowledgements is damaged, starting a new one", path=str(self._path))
            return None

    def notice(self) -> str:
        """Returns the notice of a loss for users and operators; empty: no loss is known."""
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

    def open(self, promise: Promise) -> None:
        """Opens the file with this promise. Raises OSError."""
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.truncate(self._descriptor, RECORD_BYTES)
        self._write(promise)
        os.fsync(self._descriptor)

    def note(self, promise: Promise) -> None:
        """Writes a promise that is about to be acknowledged. Raises OSError."""
        # Two transactions may arrive here out of order.
        if self._descriptor is None or promise.commits <= self._noted:
            return
        self._write(promise)
        if self._flush is None:
            self._flush = asyncio.create_task(self._flush_later(), name="promise-flush")

    async def close(self) -> None:
        """Flushes and closes the file. Safe to call twice."""
        flush, self._flush = self._flush, None
        if flush is not None:
            flush.cancel()
            with suppress(asyncio.CancelledError):
                await flush
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.fsync(descriptor)
            os.close(descriptor)

    def write_loss(self, loss: Loss, noticed_at: str) -> None:
        """Writes the report of a loss beside this file. Raises OSError."""
        report = {
            "noticed_at": noticed_at,
            "kind": loss.kind.value,
            "what": loss.words,
            "promised": {"store_id": loss.promised.store_id, "commits": loss.promised.commits},
            "found": {"store_id": loss.found.store_id, "commits": loss.found.commits},
        }
        with os.fdopen(os.open(self.loss_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(json.dumps(report, indent=2) + "\n")

    def _write(self, promise: Promise) -> None:
        assert self._descriptor is not None, "it is open"
        record = json.dumps({"store_id": promise.store_id, "commits": promise.commits}).encode()
        os.pwrite(self._descriptor, record.ljust(RECORD_BYTES - 1) + b"\n", 0)
        self._noted = promise.commits

    async def _flush_later(self) -> None:
        await asyncio.sleep(FLUSH_SECONDS)
        descriptor, self._flush = self._descriptor, None
        if descriptor is not None:
            own = os.dup(descriptor)
            try:
                await asyncio.to_thread(os.fsync, own)
            except OSError as error:
                log.warning("the record of acknowledgements is not on disk", why=error.strerror)
            finally:
                os.close(own)
