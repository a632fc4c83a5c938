"""The home of a mesh: state, sockets and logs are under it and nowhere else."""

import errno
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.kernel.errors import WeftError
from weft.kernel.file_replacement import replace_file
from weft.kernel.reasons import Reason
from weft.kernel.telemetry import BoundedLogFile

MAX_SOCKET_PATH_BYTES = 100
"""The kernel allows 107; a little is left for what gRPC adds."""
PROBE_BYTES = 4096
"""Bytes written to test whether a folder takes files: a block of the usual file systems."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True, slots=True)
class WeftHome:
    """Paths under one home."""

    root: Path

    @property
    def run(self) -> Path:
        """Sockets, locks and everything that is gone after a stop."""
        return self.root / "run"

    @property
    def state(self) -> Path:
        """Data that survives a stop: databases, session ids."""
        return self.root / "state"

    @property
    def promises(self) -> Path:
        """How much of the router's database was acknowledged: apart from `state`, which may be lost."""
        return self.root / "router.promised"

    @property
    def logs(self) -> Path:
        """Log files, each bounded."""
        return self.root / "logs"

    @property
    def up_file(self) -> Path:
        """Describes the running mesh, while one runs."""
        return self.run / "up.json"

    def create(self) -> None:
        """Make the folders, readable by their owner alone, and write to each of them.

        Raises INVALID_ARGUMENT when that is not possible: a file in their place, a disk that is read-only or full.
        """
        with self._explained():
            for folder in (self.root, self.run, self.state, self.logs):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (self.run, self.state, self.logs):
                # Folders that are there already say nothing about whether they can be written.
                _require_writable(folder)

    def log_file(self, service: str, max_bytes: int) -> BoundedLogFile:
        """The log of a service. Raises INVALID_ARGUMENT when it cannot be opened."""
        with self._explained():
            return BoundedLogFile(self.logs / f"{service}.log", max_bytes)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remedy = "free some space on its disk, or choose" if error.errno in _FULL else "choose"
            where = f" ({error.filename})" if error.filename else ""
            raise WeftError(
                Reason.INVALID_ARGUMENT,
                f"the home {self.root} cannot be used: {error.strerror}{where}; {remedy} another with --home",
            ) from error

    def address(self, name: str) -> str:
        """A gRPC listen address of this home: a Unix socket, or a free loopback port where the path is too long."""
        path = self.run / f"{name}.sock"
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            return "127.0.0.1:0"
        return f"unix:{path}"

    def running(self) -> dict[str, Any] | None:
        """What the `weft up` that runs here wrote about itself; None when none does."""
        try:
            found = json.loads(self.up_file.read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def announce(self, facts: dict[str, Any]) -> None:
        """Write `up.json` in one step, as one line. Raises INVALID_ARGUMENT when the disk does not take it."""
        with self._explained():
            replace_file(self.up_file, f"{json.dumps(facts)}\n".encode())

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Own the home for the length of the block.

        Raises ALREADY_EXISTS, naming the owner, when it is taken, and INVALID_ARGUMENT when it cannot be locked.
        """
        with self._explained():
            opened = (self.run / "up.lock").open("a+", encoding="utf-8", errors="replace")
        with opened as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                lock.seek(0)
                raise WeftError(Reason.ALREADY_EXISTS, self._owner_text(lock.read().strip())) from error
            # Read only for an error text: a full disk is no reason not to start.
            with suppress(OSError):
                lock.truncate(0)
                lock.write(f"{os.getpid()}\n")
                lock.flush()
            # A kill -9 leaves the file behind; holding the lock proves that its writer is gone.
            self.up_file.unlink(missing_ok=True)
            try:
                yield
            finally:
                with suppress(OSError):
                    self.up_file.unlink(missing_ok=True)
                    lock.truncate(0)

    def _owner_text(self, pid: str) -> str:
        running = self.running()
        where = f" at {running['url']}" if running and "url" in running else ""
        return (
            f"another weft (pid {pid if pid.isdecimal() else 'unknown'}) runs on {self.root}{where}; "
            "stop it, or start a second mesh with --home DIR --port N"
        )


def _require_writable(folder: Path) -> None:
    """Raises OSError with the folder's name."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
    except OSError as error:
        error.filename = str(folder)
        raise
