"""The home of a mesh: the folder of its state, sockets and logs."""

import errno
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.file_replacement import lock_file, replace_file
from weft.kernel.telemetry.log import get_logger

if TYPE_CHECKING:
    from runner_svc.environments.folder import EnvironmentFolder
    from weft.kernel.telemetry.structured_logs import BoundedLogFile

CENTRAL_SOCKET = "central"
"""Name of the socket of the process that serves central models."""
MAX_SOCKET_PATH_BYTES = 100
"""The kernel's limit is 107; the rest is a margin for what gRPC appends."""
PROBE_BYTES = 4096
"""Bytes written to test whether a folder is writable: a block of common file systems."""
_URI_CHARACTERS = frozenset("%?#")
"""Characters in a Unix socket's path that gRPC would parse as parts of a URI."""
SERVED = ("registry", "router", "gateway")
"""Services whose addresses `weft serve` writes to the home for commands."""
RUNNER_FILE = "runner-"
"""Name prefix of a runner's address file, which probes read. Commands ask the registry for runners instead."""
LOCK_ATTEMPTS = 3
LOCK_PAUSE_SECONDS = 0.02
_ENVIRONMENTS = "runtimes"
STARTING, RUNNING = "starting", "running"
"""States of an announced mesh: models are loading, or all of them have been ready."""
log = get_logger("weft.home")
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
        """Folder of data that survives a stop: databases, session ids."""
        return self.root / "state"

    @property
    def promises(self) -> Path:
        """File that records how much of the router's database was acknowledged. Not in `state`, which may be lost."""
        return self.root / "router.promised"

    @property
    def logs(self) -> Path:
        """Folder of log files, each bounded in size."""
        return self.root / "logs"

    @property
    def environments(self) -> "EnvironmentFolder":
        """Folder of the engine environments that `weft runtime install` creates."""
        from runner_svc.environments.folder import EnvironmentFolder  # noqa: PLC0415 - commands that read need none

        return EnvironmentFolder(self.root / _ENVIRONMENTS)

    @property
    def models(self) -> Path:
        """Folder of the models that `weft pull` downloads."""
        return self.root / "models"

    @property
    def up_file(self) -> Path:
        """File that describes the mesh once its services listen; absent if none runs."""
        return self.run / "up.json"

    @property
    def relay_file(self) -> Path:
        """File with the address at which runners join; absent if no relay runs."""
        return self.run / "relay.json"

    def address_file(self, service: str) -> Path:
        """File with the address of a `weft serve`: gRPC, or HTTP for a gateway. Absent if none runs."""
        return self.run / f"{service}.address"

    def target_file(self, process: str, service: str) -> Path:
        """File with the address of a service in the configuration of a `weft serve` process.

        Absent if the process does not run, or finds the service on this home.
        """
        return self.run / f"{process}.{service}-target"

    def owner_file(self, service: str) -> Path:
        """File with the address of the registry or router that a standby of this home waits for."""
        return self.run / f"{service}.owner"

    def metrics_socket(self, runner: str) -> Path:
        """Unix socket of the metrics of a runner process of `weft up`."""
        return self.run / f"{runner}.metrics"

    def served(self) -> dict[str, str]:
        """Returns the addresses of the services that `weft serve` runs on this home, or ran until it was killed."""
        found = {service: kept_address(self.address_file(service)) for service in SERVED}
        return {service: address for service, address in found.items() if address}

    def served_runners(self) -> dict[str, str]:
        """Returns the gRPC addresses of the runners that `weft serve` runs on this home, or ran until killed.

        The keys are process names: `runner/NAME`, or `runner` if it was started without a name.
        """
        files = sorted(self.run.glob("runner*.address"))
        found = {file.stem.replace(RUNNER_FILE, "runner/", 1): kept_address(file) for file in files}
        return {process: address for process, address in found.items() if address}

    @property
    def lock_file(self) -> Path:
        """File that a running `weft up` locks and writes its process id to."""
        return self.run / "up.lock"

    def create(self) -> None:
        """Creates the folders, accessible only to their owner, and checks that they are writable.

        Closes existing ones to other users. Raises INVALID_ARGUMENT if that fails, such as for a file in their place,
        a folder of another user, or a read-only or full disk.
        """
        private = (self.run, self.state, self.logs)
        with self._explained():
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._close_root()
            for folder in private:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._require_owned(folder)
                _take_bits(folder, _ALL_OF_OTHERS)
            for folder in private:
                # An existing folder may be read-only.
                _require_writable(folder)

    def _close_root(self) -> None:
        """Prevents other users from renaming or replacing entries of the home. Raises INVALID_ARGUMENT, OSError."""
        mode = self.root.stat().st_mode
        if mode & _WRITE_OF_OTHERS:
            self._require_owned(self.root)
        # In a folder with the sticky bit, such as /tmp, users can rename and replace only their own entries.
        if mode & _WRITE_OF_OTHERS and not mode & stat.S_ISVTX:
            try:
                _take_bits(self.root, _ALL_OF_OTHERS)
            except PermissionError:
                # It belongs to root, such as the volume of a container, which has no other users.
                log.warning("the home can be written by other users", home=str(self.root))
            for entry in self.root.iterdir():
                self._require_owned(entry)
        for kept in (self.root / _ENVIRONMENTS, self.models):
            if kept.is_dir():
                if mode & _WRITE_OF_OTHERS:
                    self._require_owned(kept)
                _take_bits(kept, _WRITE_OF_OTHERS)

    def _require_owned(self, path: Path) -> None:
        """Raises INVALID_ARGUMENT for a path of another user than this one, root, or (for root) the home's owner."""
        if not hasattr(os, "geteuid"):
            return
        trusted = {os.geteuid(), 0}
        if os.geteuid() == 0:
            trusted.add(self.root.stat().st_uid)
        if not {path.lstat().st_uid, path.stat().st_uid} <= trusted:
            raise WeftError(
                Reason.INVALID_ARGUMENT,
                f"the home {self.root} cannot be used: {path} belongs to another user; delete it or change its owner, "
                "or choose another with --home",
            )

    def log_file(self, service: str, max_bytes: int) -> "BoundedLogFile":
        """Returns the log file of a service. Raises INVALID_ARGUMENT if it cannot be opened."""
        from weft.kernel.telemetry.structured_logs import BoundedLogFile  # noqa: PLC0415 - as above

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
        """Returns a gRPC listen address: a Unix socket of this home, or a loopback port if its path is not usable."""
        path = self.run / f"{name}.sock"
        return f"unix:{path}" if is_socket_address(path) else "127.0.0.1:0"

    def http_socket(self) -> Path | None:
        """Returns the Unix socket of the HTTP API; None if its path is too long."""
        path = self.run / "http.sock"
        return path if is_socket_address(path) else None

    def running(self) -> dict[str, Any] | None:
        """Returns the description by this home's `weft up`; None if none runs or listens yet.

        Its models may still be loading, see `has_started`.
        """
        try:
            found = json.loads(self.up_file.read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def config_files(self, given: Path | None) -> tuple[Path, ...]:
        """Returns the files of `--config`; if it is not given, those of the running `weft up`, else of the next one.

        Raises as `is_claimed` and `config_files`.
        """
        from weft_app.config.loader import config_files  # noqa: PLC0415 - commands that read need none

        running = self.running() if given is None and self.is_claimed() else None
        return tuple(map(Path, running["config"])) if running and "config" in running else config_files(given)

    def is_claimed(self) -> bool:
        """Whether a `weft up` has locked the home. Raises INVALID_ARGUMENT if the lock cannot be opened."""
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

        None: none has, or it is just starting or ending. Raises as `is_claimed`.
        """
        if not self.is_claimed():
            return None
        with self._explained():
            text = self.lock_file.read_text("utf-8", errors="replace").strip()
        return int(text) if text.isdecimal() else None

    def is_claimed_by(self, process: int) -> bool:
        """Whether a process has the lock file open; also true if the system does not show that.

        The id in the file proves nothing: anyone who can write there chooses it, and ids in containers differ.
        """
        opened = Path("/proc", str(process), "fd")
        try:
            lock = self.lock_file.lstat()
            return not opened.parent.parent.is_dir() or any(_is_same(each, lock) for each in opened.iterdir())
        except OSError as error:
            # This user may not signal a process whose files it may not see.
            return isinstance(error, PermissionError)

    def announce(self, facts: dict[str, Any]) -> None:
        """Writes `up.json` atomically, as one line. Raises INVALID_ARGUMENT if it cannot be written."""
        with self._explained():
            replace_file(self.up_file, f"{json.dumps(facts)}\n".encode())

    def withdraw(self) -> None:
        """Removes `up.json`. If that fails, it is ignored once the lock is free."""
        with suppress(OSError):
            self.up_file.unlink(missing_ok=True)

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Locks the home for the duration of the block.

        Raises ALREADY_EXISTS, naming the owner, if another process has locked it; INVALID_ARGUMENT if locking fails.
        """
        with self._explained():
            opened = self.lock_file.open("a+", encoding="utf-8", errors="replace")
        with opened as lock:
            try:
                _lock_alone(lock)
            except OSError as error:
                lock.seek(0)
                raise WeftError(Reason.ALREADY_EXISTS, self._owner_text(lock.read().strip())) from error
            # The pid is only for error texts and `owner`: a full disk must not prevent a start.
            with suppress(OSError):
                lock.truncate(0)
                lock.write(f"{os.getpid()}\n")
                lock.flush()
            # A killed process leaves its files. Holding the lock proves that their writer has ended.
            for file in (self.up_file, self.relay_file):
                file.unlink(missing_ok=True)
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
    """Writes an address to a file; None removes the file."""
    # An unwritable folder must not end a service; commands then need its address.
    with suppress(OSError):
        if address is None:
            file.unlink(missing_ok=True)
        else:
            replace_file(file, address.encode())


def kept_address(file: Path) -> str:
    """Returns the address in a file of `keep_address`; empty if there is none."""
    try:
        return file.read_text("utf-8").strip()
    except (OSError, ValueError):
        return ""


def state_of(running: Mapping[str, Any]) -> str:
    """Returns the state of a described mesh. Descriptions without one were written once the mesh ran."""
    return STARTING if running.get("state") == STARTING else RUNNING


def has_started(running: Mapping[str, Any] | None) -> bool:
    """Whether a mesh is described and all its models have been ready."""
    return running is not None and state_of(running) == RUNNING


def _lock_alone(lock: IO[str]) -> None:
    """Locks a file. Raises OSError if another process keeps it locked for longer than `owner` does."""
    for _ in range(LOCK_ATTEMPTS):
        with suppress(OSError):
            lock_file(lock)
            return
        time.sleep(LOCK_PAUSE_SECONDS)
    lock_file(lock)


def _is_same(path: Path, file: os.stat_result) -> bool:
    with suppress(OSError):
        return os.path.samestat(path.stat(), file)
    return False


_ALL_OF_OTHERS, _WRITE_OF_OTHERS = 0o077, 0o022
"""Permissions of a folder for its group and others."""


def _take_bits(folder: Path, bits: int) -> None:
    """Removes permissions of a folder, if it has them."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & bits:
        folder.chmod(mode & ~bits)


def _require_writable(folder: Path) -> None:
    """Raises OSError naming the folder."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
    except OSError as error:
        error.filename = str(folder)
        raise
