"""What supervising needs of the operating system, and how much of it each one gives.

Linux is what weft is developed and tested on. `PortableSystem` is for other POSIX systems (macOS, the BSDs): its code
runs in the tests, but on Linux only; it has never been run on any other system. Windows has no process groups, no
sessions and no signals that a program could catch, so nothing can be supervised there: `this_system` says so.
"""

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol

import psutil

from runner_svc.supervise.cgroup import CgroupLeaf, make_leaf
from runner_svc.supervise.guardian import LINUX, PORTABLE, descendants, process_table
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


class System(Protocol):
    """One kind of operating system."""

    @property
    def guardian_mode(self) -> str:
        """How the guardian is to work."""
        ...

    @property
    def words(self) -> str:
        """What holds an engine's descendants together where there is no leaf, for people."""
        ...

    def make_leaf(self, name: str) -> CgroupLeaf | None:
        """A cgroup of its own for an engine, where there can be one."""
        ...

    def descendants(self, pid: int) -> set[int]:
        """Living descendants of a process, without itself."""
        ...

    def own_processes(self) -> Iterator[int]:
        """Ids of the processes of our user."""
        ...

    def started_at(self, pid: int) -> int | None:
        """When a process began, in a unit of this system's own; with the id it names a process for good. None: gone."""
        ...

    def is_alive(self, pid: int) -> bool:
        """Whether a process runs; one that only waits to be reaped does not."""
        ...

    def variable(self, pid: int, name: str) -> str | None:
        """An environment variable as the process was started with; None where there is none or it cannot be read."""
        ...

    def kill_if(self, pid: int, is_it: Callable[[], bool]) -> bool:
        """SIGKILL for a process if it is the one that is meant; whether it was sent."""
        ...


class LinuxSystem:
    """See System: /proc, pidfds, cgroup v2, prctl."""

    guardian_mode = LINUX
    words = "guardian (sub-reaper)"

    def __init__(self, *, cgroups: bool = True) -> None:
        self._cgroups = cgroups

    def make_leaf(self, name: str) -> CgroupLeaf | None:
        """See System.make_leaf: where we may write cgroups and want to."""
        return make_leaf(name) if self._cgroups else None

    def descendants(self, pid: int) -> set[int]:
        """See System.descendants."""
        return descendants(pid, process_table())

    def own_processes(self) -> Iterator[int]:
        """See System.own_processes."""
        for name in os.listdir("/proc"):  # noqa: PTH208 - thousands of them: names are enough
            if name.isdigit():
                with suppress(OSError):
                    if os.stat(f"/proc/{name}").st_uid == os.getuid():  # noqa: PTH116 - as above
                        yield int(name)

    def started_at(self, pid: int) -> int | None:
        """See System.started_at: clock ticks since the machine started."""
        fields = _stat_fields(pid)
        return int(fields[19]) if fields else None

    def is_alive(self, pid: int) -> bool:
        """See System.is_alive."""
        fields = _stat_fields(pid)
        return bool(fields) and fields[0] not in (b"Z", b"X")

    def variable(self, pid: int, name: str) -> str | None:
        """See System.variable."""
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - as above
                entries = file.read().split(b"\0")
        except OSError:
            return None
        start = f"{name}=".encode()
        found = next((entry for entry in entries if entry.startswith(start)), None)
        return None if found is None else found[len(start) :].decode("utf-8", "replace")

    def kill_if(self, pid: int, is_it: Callable[[], bool]) -> bool:
        """See System.kill_if: held by a pidfd, the id cannot be taken over between looking and sending."""
        try:
            held = os.pidfd_open(pid)
        except OSError:
            return False
        try:
            # A zombie has ended: nothing is left to kill.
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
    """From the third of /proc/<pid>/stat on: the first two end with the last bracket of the program's name."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - in every turn of a sweep
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


class PortableSystem:
    """See System: what psutil finds, and a process group. Descendants that left their parent's tree are lost to it."""

    guardian_mode = PORTABLE
    words = "process group"

    def make_leaf(self, name: str) -> CgroupLeaf | None:
        """See System.make_leaf: never."""
        del name
        return None

    def descendants(self, pid: int) -> set[int]:
        """See System.descendants."""
        found = set()
        with suppress(psutil.Error):
            for process in psutil.Process(pid).children(recursive=True):
                with suppress(psutil.Error):
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.add(process.pid)
        return found

    def own_processes(self) -> Iterator[int]:
        """See System.own_processes."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.uids().real == os.getuid():
                    yield process.pid

    def started_at(self, pid: int) -> int | None:
        """See System.started_at: microseconds since 1970."""
        try:
            return round(psutil.Process(pid).create_time() * 1e6)
        except psutil.Error:
            return None

    def is_alive(self, pid: int) -> bool:
        """See System.is_alive."""
        try:
            return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
        except psutil.Error:
            return False

    def variable(self, pid: int, name: str) -> str | None:
        """See System.variable."""
        try:
            return psutil.Process(pid).environ().get(name)
        except (psutil.Error, OSError):
            return None

    def kill_if(self, pid: int, is_it: Callable[[], bool]) -> bool:
        """See System.kill_if: between looking and sending the id is only unlikely to change hands."""
        with suppress(psutil.Error, OSError):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and is_it():
                os.kill(pid, signal.SIGKILL)
                return True
        return False


def this_system(platform: str = sys.platform) -> System:
    """The system we run on. Raises UNSUPPORTED_OPERATION where processes cannot be supervised."""
    if platform == "win32":
        raise WeftError(
            Reason.UNSUPPORTED_OPERATION,
            "weft cannot supervise processes on Windows: it has no sessions, process groups and termination signals; "
            "start the server yourself and attach it with runtime openai_http",
        )
    return LinuxSystem() if platform == "linux" else PortableSystem()
