"""Process supervision by operating system.

weft is developed and tested on Linux. `PortableSystem` alone is for other POSIX systems (macOS, the BSDs): tests run
its code, but only on Linux. Windows has no process groups, sessions and termination signals, so processes cannot be
supervised there: `this_system` raises.
"""

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import psutil
from typing_extensions import override

from runner_svc.supervise.cgroup import CgroupLeaf, make_leaf
from runner_svc.supervise.guardian import LINUX, PORTABLE
from weft.gpu.process import process_id_of
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason


class PortableSystem:
    """The process functions of a POSIX system: psutil and a process group. Misses descendants that left their tree."""

    guardian_mode = PORTABLE
    words = "process group"
    """How an engine's descendants are contained without a cgroup leaf, for people."""

    def make_leaf(self, name: str) -> CgroupLeaf | None:
        """Creates a cgroup leaf for an engine; None: not possible."""
        del name
        return None

    def descendants(self, pid: int) -> set[int]:
        """Returns the living descendants of a process."""
        found = set()
        with suppress(psutil.Error):
            for process in psutil.Process(pid).children(recursive=True):
                with suppress(psutil.Error):
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.add(process.pid)
        return found

    def own_processes(self) -> Iterator[int]:
        """Yields the ids of the own user's processes."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.uids().real == os.getuid():
                    yield process.pid

    def started_at(self, pid: int) -> int | None:
        """Returns a process's start time in a system-dependent unit, unique with its id. None: it has ended."""
        process = process_id_of(pid)
        return None if process is None else process.start_ticks

    def variable(self, pid: int, name: str) -> str | None:
        """Returns an environment variable that a process was started with; None: unset or unreadable."""
        try:
            return psutil.Process(pid).environ().get(name)
        except (psutil.Error, OSError):
            return None

    def kill_if(self, pid: int, is_it: Callable[[], bool]) -> bool:
        """Sends SIGKILL to a process if `is_it` confirms its identity; returns whether it was sent.

        The id may be reused between check and signal, which is unlikely.
        """
        with suppress(OSError):
            if self.started_at(pid) is not None and is_it():
                os.kill(pid, signal.SIGKILL)
                return True
        return False


class LinuxSystem(PortableSystem):
    """The system functions of Linux: also pidfds, cgroup v2, prctl."""

    guardian_mode = LINUX
    words = "guardian (sub-reaper)"

    def __init__(self, *, cgroups: bool = True) -> None:
        self._cgroups = cgroups

    @override
    def make_leaf(self, name: str) -> CgroupLeaf | None:
        return make_leaf(name) if self._cgroups else None

    @override
    def kill_if(self, pid: int, is_it: Callable[[], bool]) -> bool:
        # Through a pidfd, so that the id cannot be reused between check and signal.
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


def this_system(platform: str = sys.platform) -> PortableSystem:
    """Returns the functions of the current system. Raises UNSUPPORTED_OPERATION if processes cannot be supervised."""
    if platform == "win32":
        raise WeftError(
            Reason.UNSUPPORTED_OPERATION,
            "weft cannot supervise processes on Windows: it has no sessions, process groups and termination signals; "
            "start the server yourself and attach it with runtime openai_http",
        )
    return LinuxSystem() if platform == "linux" else PortableSystem()
