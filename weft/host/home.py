"""The folder a mesh lives in: state, sockets and logs are under it and nowhere else."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

MAX_SOCKET_PATH_BYTES = 100
"""The kernel allows 107; a little is left for what gRPC adds."""


@dataclass(frozen=True, slots=True)
class WeftHome:
    """Paths under one home."""

    root: Path

    @property
    def run(self) -> Path:
        """Sockets, locks and what else is gone after a stop."""
        return self.root / "run"

    @property
    def state(self) -> Path:
        """What survives a stop: databases, session ids."""
        return self.root / "state"

    @property
    def logs(self) -> Path:
        """Log files, each bounded."""
        return self.root / "logs"

    @property
    def up_file(self) -> Path:
        """Says who runs here, while somebody does."""
        return self.run / "up.json"

    def create(self) -> None:
        """Make the folders, readable by their owner alone. Raises INVALID_ARGUMENT when that is not possible."""
        try:
            for folder in (self.root, self.run, self.state, self.logs):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise WeftError(
                Reason.INVALID_ARGUMENT,
                f"the home {self.root} cannot be used: {error.strerror}; choose another with --home",
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
            found: dict[str, Any] = json.loads(self.up_file.read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return found

    def announce(self, facts: dict[str, Any]) -> None:
        """Write `up.json` in one step, as one line."""
        fresh = self.up_file.with_suffix(".new")
        fresh.write_text(json.dumps(facts) + "\n", "utf-8")
        fresh.replace(self.up_file)

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Own the home for the length of the block. Raises ALREADY_EXISTS, naming the owner, when it is taken."""
        with (self.run / "up.lock").open("a+", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                lock.seek(0)
                raise WeftError(Reason.ALREADY_EXISTS, self._owner_text(lock.read().strip())) from error
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            # A kill -9 leaves the file behind; holding the lock proves that its writer is gone.
            self.up_file.unlink(missing_ok=True)
            try:
                yield
            finally:
                self.up_file.unlink(missing_ok=True)
                lock.truncate(0)

    def _owner_text(self, pid: str) -> str:
        running = self.running()
        where = f" at {running['url']}" if running else ""
        return (
            f"another weft (pid {pid or 'unknown'}) runs on {self.root}{where}; "
            "stop it, or start a second mesh with --home DIR --port N"
        )
