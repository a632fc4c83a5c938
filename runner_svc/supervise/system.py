"""Process supervision by operating system.

weft is developed and tested on Linux. `PortableSystem` is for other POSIX systems (macOS, the BSDs): tests run its
code, but only on Linux. Windows has no process groups, sessions and termination signals, so processes cannot be
supervised there: `this_system` raises.
"""

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol

import psutil
from typing_extensions import override

from runner_svc.supervise.cgroup import CgroupLeaf, make_leaf
from runner_svc.supervise.guardian import LINUX, PORTABLE, descendants, process_table
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


class System(Protocol):
    """The process functions of an operating system."""

    @property
    def guardian_mode(self) -> str:
        """The guardian's mode."""
        ...

    @property
    def words(self) -> str:
        """How an engine's descendants are contained without a cgroup leaf, for people."""
        ...

    def make_leaf(self, name: str) -> CgroupLeaf | None:
        """Creates a cgroup leaf for an engine; None: not possible."""
        ...

    def descendants(self, pid: int) -> set[int]:
        """Returns the living descendants of a process."""
        ...

    def own_processes(self) -> Iterator[int]:
        """Yields the ids of the own user's processes."""
        ...

    def started_at(self, pid: int) -> int | None:
        """Returns a process's start time in a system-dependent unit, unique with its id. None: it has ended."""
        ...

    def is_alive(self, pid: int) -> bool:
        """Whether a process is running; zombies are not."""
        ...

    def variable(self, pid: int, name: str) -> str | None:
        """Returns an environment variable that a process was started with; None: unset or unreadable."""
        ...

    def kill_if(self, pid: int, is_it: Callable[[], bool]) -> bool:
        """Sends SIGKILL to a process if `is_it` confirms its identity; returns whether it was sent."""
        ...


class LinuxSystem(System):
    """The System of Linux: /proc, pidfds, cgroup v2, prctl."""

    guardian_mode = LINUX
    words = "guardian (sub-reaper)"

    def __init__(self, *, cgroups: bool = True) -> None:
        self._cgroups = cgroups

    def make_leaf(self, name: str) -> CgroupLeaf | None:
        """Makes a leaf if cgroups are enabled and writable."""
        return make_leaf(name) if self._cgroups else None

    @override
    def descendants(self, pid: int) -> set[int]:
        return descendants(pid, process_table())

    @override
    def own_processes(self) -> Iterator[int]:
        for name in os.listdir("/proc"):  # noqa: PTH208 - thousands of entries: names are enough
            if name.isdigit():
                with suppress(OSError):
                    if os.stat(f"/proc/{name}").st_uid == os.getuid():  # noqa: PTH116 - as above
                        yield int(name)

    def started_at(self, pid: int) -> int | None:
        """Returns the start time in clock ticks since boot."""
        fields = _stat_fields(pid)
        return int(fields[19]) if fields else None

    @override
    def is_alive(self, pid: int) -> bool:
        fields = _stat_fields(pid)
        return bool(fields) and fields[0] not in (b"Z", b"X")

    @override
    def variable(self, pid: int, name: str) -> str | None:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - as above
                entries = file.read().split(b"\0")
        except OSError:
            return None
        start = f"{name}=".encode()
        found = next((entry for entry in entries if entry.startswith(start)), None)
        return None if found is None else found[len(start) :].decode("utf-8", "replace")

    def kill_if(self, pid: int, is_it: Callable[[], bool]) -> bool:
        """Sends SIGKILL through a pidfd, so that the id cannot be reused between check and signal."""
        try:
            held = os.pidfd_open(pid)
        except OSError:
            return False
        try:
            # A zombie has already ended.
            ended = select.poll()
            ended.register(held, select.POLLIN)
            if ended.poll(0) or not is_it():
                return False
            signal.pidfd_send_signal(held, signal.SIGKILL)
        except OSError:
            return False
        finally:
            os.close(held)
        return True


def _stat_fields(pid: int) -> list[bytes]:
    """Returns the fields of /proc/<pid>/stat from the third on: the second one ends with the last bracket."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - called for every process of a sweep
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


class PortableSystem(System):
    """The System of other POSIX systems: psutil and a process group. It misses descendants that left their tree."""

    guardian_mode = PORTABLE
    words = "process group"

    def make_leaf(self, name: str) -> CgroupLeaf | None:
        """Returns None: there are no cgroups."""
        del name
        return None

    @override
    def descendants(self, pid: int) -> set[int]:
        found = set()
        with suppress(psutil.Error):
            for process in psutil.Process(pid).children(recursive=True):
                with suppress(psutil.Error):
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.add(process.pid)
        return found

    @override
    def own_processes(self) -> Iterator[int]:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.uids().real == os.getuid():
                    yield process.pid

    def started_at(self, pid: int) -> int | None:
        """Returns the start time in microseconds since 1970."""
        try:
            return round(psutil.Process(pid).create_time() * 1e6)
        except psutil.Error:
            return None

    @override
    def is_alive(self, pid: int) -> bool:
        try:
            return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
        except psutil.Error:
            return False

    @override
    def variable(self, pid: int, name: str) -> str | None:
        try:
            return psutil.Process(pid).environ().get(name)
        except (psutil.Error, OSError):
            return None

    def kill_if(self, pid: int, is_it: Callable[[], bool]) -> bool:
        """Sends SIGKILL by id: its reuse between check and signal is unlikely but possible."""
        with suppress(psutil.Error, OSError):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and is_it():
                os.kill(pid, signal.SIGKILL)
                return True
        return False


def this_system(platform: str = sys.platform) -> System:
    """Returns the current System. Raises UNSUPPORTED_OPERATION if processes cannot be supervised."""
    if platform == "win32":
        raise WeftError(
            Reason.UNSUPPORTED_OPERATION,
            "weft cannot supervise processes on Windows: it has no sessions, process groups and termination signals; "
            "start the server yourself and attach it with runtime openai_http",
        )
    return LinuxSystem() if platform == "linux" else PortableSystem()
