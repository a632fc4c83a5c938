"""A PostgreSQL server for tests, run from the binaries in the PyPI wheel `pgserver`.

Only the binaries are used. If it runs as root, as in a container, the wheel's Python code would add a user to the
machine and open folders up to the root of the file system.
"""

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PYTHON_OF_THE_WHEEL = (3, 12)
"""The newest Python version with a wheel."""
START_LIMIT_SECONDS = 30.0
STOP_LIMIT_SECONDS = 10.0
SQL_LIMIT_SECONDS = 60.0
MEMORY = Path("/dev/shm")  # noqa: S108 - the folder in it is made by mkdtemp
"""Fastest place: removing a cluster from a disk takes up to six seconds."""
ROOM_BYTES = 2 * 1024**3
SOCKET_NAME = ".s.PGSQL.5432"
# Fast instead of durable; `synchronous_commit` is off so that a test can see the store enable it.
SETTINGS: Mapping[str, str] = {
    "listen_addresses": "",
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "autovacuum": "off",
    "shared_buffers": "16MB",
    "max_connections": "50",
    "log_min_messages": "warning",
}
_PR_SET_PDEATHSIG = 1
_EMPTY_IT = """
SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid();
DROP SCHEMA public CASCADE;
CREATE SCHEMA public AUTHORIZATION pg_database_owner;
GRANT USAGE ON SCHEMA public TO PUBLIC;
SELECT count(*) FROM pg_namespace WHERE nspname NOT LIKE 'pg\\_%' AND nspname NOT IN ('information_schema', 'public');
"""
"""Terminates every other connection and waits until its locks are released; returns the number of remaining ones, 0."""


class NoPostgresError(Exception):
    """The PostgreSQL binaries are missing."""


class PostgresStartError(Exception):
    """The server did not start; the message has its output."""


class PostgresServer:
    """A running server and its databases."""

    def __init__(self, binaries: Path, folder: Path, identity: Mapping[str, Any], settings: Mapping[str, str]) -> None:
        """`identity`: arguments for subprocess that set the user. `settings`: of the server."""
        self._binaries = binaries
        self._settings = settings
        self._identity = identity
        self._process: subprocess.Popen[bytes] | None = None
        self.socket_folder = folder
        self._databases = 0
        self._empty: list[str] = []

    def start(self) -> None:
        """Starts its process; `await_ready` waits for it. The process ends with the thread that called this."""
        settings = [word for key, value in self._settings.items() for word in ("-c", f"{key}={value}")]
        stop_with_parent = partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGQUIT)
        with (self.socket_folder / "log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - a program of the wheel
                [self._binaries / "postgres", "-D", self._data, "-k", self.socket_folder, *settings],
                cwd=self.socket_folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=stop_with_parent,  # noqa: PLW1509 - prctl alone, which needs no lock
                **self._identity,
            )

    def await_ready(self) -> None:
        """Waits until it accepts connections. Raises PostgresStartError."""
        assert self._process is not None
        deadline = time.monotonic() + START_LIMIT_SECONDS
        probe = [str(self._binaries / "pg_isready"), "-q", "-h", str(self.socket_folder)]
        while subprocess.run(probe, check=False, timeout=START_LIMIT_SECONDS).returncode != 0:  # noqa: S603 - as above
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = (self.socket_folder / "log").read_text(errors="replace")
                raise PostgresStartError(f"PostgreSQL did not start: {said}")
            time.sleep(0.02)

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """Ends its process, if running: SIGQUIT like a crash, SIGINT regularly (which also ends all connections)."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_SECONDS)
        process.kill()
        process.wait()

    @contextmanager
    def replica(self) -> Iterator["PostgresServer"]:
        """Yields a streaming standby of it with its own folder, which `promote` makes a primary."""
        folder = Path(tempfile.mkdtemp(prefix="weft-pg-", dir=self.socket_folder.parent))
        try:
            identity = _identity(folder)
            options = ["-h", str(self.socket_folder), "-U", "postgres", "-R", "-c", "fast", "--no-sync"]
            command = [str(self._binaries / "pg_basebackup"), "-D", str(folder / "data"), *options]
            subprocess.run(  # noqa: S603 - a program of the wheel
                command, cwd=folder, check=True, capture_output=True, timeout=START_LIMIT_SECONDS, **identity
            )
            # Once promoted, it waits for no other.
            settings = {**self._settings, "synchronous_standby_names": ""}
            server = PostgresServer(self._binaries, folder, identity, settings)
            try:
                server.start()
                server.await_ready()
                yield server
            finally:
                server.stop()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def promote(self) -> None:
        """Makes a standby the primary."""
        self.sql("SELECT pg_promote()")

    @property
    def pid(self) -> int:
        """The id of its running process."""
        assert self._process is not None
        return self._process.pid

    @property
    def _data(self) -> Path:
        return self.socket_folder / "data"

    @property
    def socket(self) -> Path:
        """Path of its socket, which has a fixed name."""
        return self.socket_folder / SOCKET_NAME

    def url(self, database: str, socket_folder: Path | None = None) -> str:
        """Returns the URL of a database.

        `socket_folder`: the folder of another socket that leads to the server, with the same name.
        """
        return f"postgresql://postgres@/{database}?host={socket_folder or self.socket_folder}"

    def sql(self, statement: str, database: str = "postgres") -> str:
        """Runs a statement with psql and returns its output, unaligned and without headings."""
        where = ["-h", str(self.socket_folder), "-U", "postgres", "-d", database]
        command = [str(self._binaries / "psql"), "-X", "-q", "-A", "-t", *where, "-c", statement]
        done = subprocess.run(  # noqa: S603 - a program of the wheel, and a test's own statement
            command, capture_output=True, text=True, timeout=SQL_LIMIT_SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    @contextmanager
    def fresh_database(self) -> Iterator[str]:
        """Yields the name of an empty database, which is emptied afterwards, even while clients are connected.

        Databases are reused because creating one takes as long as most tests.
        """
        name = self._empty.pop() if self._empty else self._make_database()
        yield name
        assert self.sql(_EMPTY_IT, name).endswith("\n0"), f"something is left in {name}"
        self._empty.append(name)

    def _make_database(self) -> str:
        self._databases += 1
        name = f"test{self._databases}"
        self.sql(f"CREATE DATABASE {name} STRATEGY file_copy")
        return name


@contextmanager
def running_postgres(settings: Mapping[str, str] = SETTINGS) -> Iterator[PostgresServer]:
    """Yields a server in a new folder directly under /dev/shm or /tmp: a socket path has at most 107 characters.

    Raises NoPostgresError, PostgresStartError.
    """
    parent = MEMORY if _has_room(MEMORY) else Path("/tmp")  # noqa: S108 - as above
    folder = Path(tempfile.mkdtemp(prefix="weft-pg-", dir=parent))
    try:
        identity = _identity(folder)
        binaries = _binaries(folder)
        _make_cluster(binaries, folder, identity)
        server = PostgresServer(binaries, folder, identity, settings)
        try:
            server.start()
            server.await_ready()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _has_room(folder: Path) -> bool:
    """Whether a cluster and the wheel's programs fit there, and may be executed."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize > ROOM_BYTES and not found.f_flag & (os.ST_NOEXEC | os.ST_RDONLY)


def _identity(folder: Path) -> dict[str, Any]:
    """Returns subprocess arguments for the server's user: `nobody` if this process is root."""
    # PostgreSQL refuses to run as root.
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _binaries(folder: Path) -> Path:
    spec = find_spec("pgserver")
    if spec is None or spec.origin is None:
        newest = ".".join(map(str, PYTHON_OF_THE_WHEEL))
        raise NoPostgresError(
            f"the wheel pgserver is not installed; it exists for Python {newest} and older, and is in the dependency "
            "group dev"
        )
    package = Path(spec.origin).parent
    if os.geteuid() != 0:
        return package / "pginstall" / "bin"
    # `nobody` may not be allowed to access the checkout. The libraries are found relative to the programs.
    copy = folder / "wheel"
    shutil.copytree(package / "pginstall", copy / package.name / "pginstall", ignore=shutil.ignore_patterns("include"))
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, copy / libraries.name)
    return copy / package.name / "pginstall" / "bin"


def _make_cluster(binaries: Path, folder: Path, identity: dict[str, Any]) -> None:
    options = ["-U", "postgres", "--auth=trust", "--no-sync", "--locale=C", "--encoding=UTF8"]
    command = [str(binaries / "initdb"), "-D", str(folder / "data"), *options]
    done = subprocess.run(  # noqa: S603 - a program of the wheel
        command, cwd=folder, capture_output=True, text=True, timeout=START_LIMIT_SECONDS, check=False, **identity
    )
    if done.returncode != 0:
        raise PostgresStartError(f"initdb failed: {done.stdout}{done.stderr}")
