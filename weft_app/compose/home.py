"""The home of a mesh: the folder of its state, sockets and logs."""

import errno
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from weft.kernel.errors import WeftError
from weft.kernel.file_lock import lock_file
from weft.kernel.file_replacement import replace_file
from weft.kernel.reasons import Reason

if TYPE_CHECKING:
    from runner_svc.environments.folder import EnvironmentFolder
    from weft.kernel.telemetry import BoundedLogFile

MAX_SOCKET_PATH_BYTES = 100
"""The kernel allows 107; the rest is a margin for what gRPC appends."""
PROBE_BYTES = 4096
"""Bytes written to test whether a folder takes files: a block of the usual file systems."""
_URI_CHARACTERS = frozenset("%?#")
"""Characters that gRPC takes for parts of a URI in the path of a Unix socket."""
SERVED = ("registry", "router", "gateway")
"""Services whose address `weft serve` writes to the home, so that commands find them."""
RUNNER_FILE = "runner-"
"""Begin of the name of the address file of a runner; commands ask the registry for runners, and probes the file."""
LOCK_ATTEMPTS = 3
LOCK_PAUSE_SECONDS = 0.02
STARTING, RUNNING = "starting", "running"
"""States of an announced mesh: its models still load, or all of them were ready once."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True, slots=True)
class WeftHome:
    """Paths under one home."""

    root: Path

    @property
    def run(self) -> Path:
        """Folder of sockets, locks and other files that exist only while a mesh runs."""
        return self.root / "run"

    @property
    def state(self) -> Path:
        """Folder of the data that survives a stop: databases, session ids."""
        return self.root / "state"

    @property
    def promises(self) -> Path:
        """File that records how much of the router's database was acknowledged; not in `state`, which may be lost."""
        return self.root / "router.promised"

    @property
    def logs(self) -> Path:
        """Folder of log files, each bounded in size."""
        return self.root / "logs"

    @property
    def environments(self) -> "EnvironmentFolder":
        """Folder of the environments of engines, which `weft runtime install` makes."""
        from runner_svc.environments.folder import EnvironmentFolder  # noqa: PLC0415 - commands that read need none

        return EnvironmentFolder(self.root / "runtimes")

    @property
    def models(self) -> Path:
        """Folder of the models that `weft pull` loads."""
        return self.root / "models"

    @property
    def up_file(self) -> Path:
        """File that describes the mesh from when its services listen; absent when none runs."""
        return self.run / "up.json"

    def address_file(self, service: str) -> Path:
        """File with the address of a service that `weft serve` runs: gRPC, of a gateway HTTP; absent when none runs."""
        return self.run / f"{service}.address"

    def target_file(self, process: str, service: str) -> Path:
        """File with the address at which the configuration of a process of `weft serve` has a service of the mesh.

        Absent when the process does not run, or finds that service on this home.
        """
        return self.run / f"{process}.{service}-target"

    def owner_file(self, service: str) -> Path:
        """File with the address of the registry or the router that a standby of this home waits for."""
        return self.run / f"{service}.owner"

    def metrics_socket(self, runner: str) -> Path:
        """Unix socket on which a runner process of `weft up` serves its metrics."""
        return self.run / f"{runner}.metrics"

    def served(self) -> dict[str, str]:
        """Returns the addresses of the services that `weft serve` runs on this home, or ran until it was killed."""
        found = {}
        for service in SERVED:
            with suppress(OSError, ValueError):
                found[service] = self.address_file(service).read_text("utf-8").strip()
        return found

    def served_runners(self) -> dict[str, str]:
        """Returns the gRPC addresses of the runners that `weft serve` runs on this home, or ran until killed.

        Their names are those of processes: `runner/NAME`, or `runner` where it was started without a name.
        """
        found = {}
        for file in sorted(self.run.glob("runner*.address")):
            with suppress(OSError, ValueError):
                found[file.stem.replace(RUNNER_FILE, "runner/", 1)] = file.read_text("utf-8").strip()
        return found

    @property
    def lock_file(self) -> Path:
        """File that a running `weft up` has locked, with its process id."""
        return self.run / "up.lock"

    def create(self) -> None:
        """Makes the folders, readable by their owner only, and checks that each can be written.

        Raises INVALID_ARGUMENT when that fails: a file in their place, a read-only or full disk.
        """
        with self._explained():
            for folder in (self.root, self.run, self.state, self.logs):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (self.run, self.state, self.logs):
                # An existing folder may be read-only.
                _require_writable(folder)

    def log_file(self, service: str, max_bytes: int) -> "BoundedLogFile":
        """Returns the log file of a service. Raises INVALID_ARGUMENT when it cannot be opened."""
        from weft.kernel.telemetry import BoundedLogFile  # noqa: PLC0415 - as above

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
        """Returns a gRPC listen address: a Unix socket of this home, or a loopback port if its path is no address."""
        path = self.run / f"{name}.sock"
        return f"unix:{path}" if is_socket_address(path) else "127.0.0.1:0"

    def http_socket(self) -> Path | None:
        """Returns the Unix socket of the HTTP API; None: its path is too long for an address."""
        path = self.run / "http.sock"
        return path if is_socket_address(path) else None

    def running(self) -> dict[str, Any] | None:
        """Returns the description that the `weft up` of this home wrote; None when none runs, or listens yet.

        Its models may still load, see `has_started`.
        """
        try:
            found = json.loads(self.up_file.read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def is_claimed(self) -> bool:
        """Whether a `weft up` has locked the home. Raises INVALID_ARGUMENT where the lock cannot be opened."""
        with self._explained():
            try:
                opened = self.lock_file.open()
            except FileNotFoundError:
                return False
        with opened as lock:
            try:
                lock_file(lock, is_shared=True)
            except OSError:
                return True
        return False

    def owner(self) -> int | None:
        """Returns the process id of the `weft up` that has locked the home.

        None: none has, or it only begins or just ends. Raises as `is_claimed`.
        """
        if not self.is_claimed():
            return None
        with self._explained():
            text = self.lock_file.read_text("utf-8", errors="replace").strip()
        return int(text) if text.isdecimal() else None

    def announce(self, facts: dict[str, Any]) -> None:
        """Writes `up.json` atomically, as one line. Raises INVALID_ARGUMENT when it cannot be written."""
        with self._explained():
            replace_file(self.up_file, f"{json.dumps(facts)}\n".encode())

    def withdraw(self) -> None:
        """Removes `up.json`; one that cannot be removed counts for nothing once the lock is free."""
        with suppress(OSError):
            self.up_file.unlink(missing_ok=True)

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Locks the home for the duration of the block.

        Raises ALREADY_EXISTS, naming the owner, when another process has locked it; INVALID_ARGUMENT when that fails.
        """
        with self._explained():
            opened = self.lock_file.open("a+", encoding="utf-8", errors="replace")
        with opened as lock:
            try:
                _lock_alone(lock)
            except OSError as error:
                lock.seek(0)
                raise WeftError(Reason.ALREADY_EXISTS, self._owner_text(lock.read().strip())) from error
            # The pid is for error texts and `owner`: a full disk must not prevent a start.
            with suppress(OSError):
                lock.truncate(0)
                lock.write(f"{os.getpid()}\n")
                lock.flush()
            # After a SIGKILL the file remains; holding the lock proves that its writer has ended.
            self.up_file.unlink(missing_ok=True)
            try:
                yield
            finally:
                self.withdraw()
                with suppress(OSError):
                    lock.truncate(0)

    def _owner_text(self, pid: str) -> str:
        running = self.running()
        where = f" at {running['url']}" if running and "url" in running else ""
        return (
            f"another weft (pid {pid if pid.isdecimal() else 'unknown'}) runs on {self.root}{where}; "
            "stop it, or start a second mesh with --home DIR --port N"
        )


def is_socket_address(path: Path) -> bool:
    """Whether gRPC can address a Unix socket by its path."""
    return len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES and _URI_CHARACTERS.isdisjoint(str(path))


def keep_address(file: Path, address: str | None) -> None:
    """Writes an address to a file of a home; None: removes the file."""
    # A folder that takes no file any more must not end a service: commands then need its address.
    with suppress(OSError):
        if address is None:
            file.unlink(missing_ok=True)
        else:
            replace_file(file, address.encode())


def state_of(running: Mapping[str, Any]) -> str:
    """Returns the state in the description of a mesh; a description without one was written once the mesh ran."""
    return STARTING if running.get("state") == STARTING else RUNNING


def has_started(running: Mapping[str, Any] | None) -> bool:
    """Whether a mesh is described whose models were all ready."""
    return running is not None and state_of(running) == RUNNING


def _lock_alone(lock: IO[str]) -> None:
    """Locks a file. Raises OSError where another process keeps it locked: `owner` has it for a moment only."""
    for _ in range(LOCK_ATTEMPTS):
        with suppress(OSError):
            lock_file(lock)
            return
        time.sleep(LOCK_PAUSE_SECONDS)
    lock_file(lock)


def _require_writable(folder: Path) -> None:
    """Raises OSError with the folder's name."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
    except OSError as error:
        error.filename = str(folder)
        raise
