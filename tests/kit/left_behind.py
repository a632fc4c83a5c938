"""A pytest plugin: fails test modules that leave processes, threads or listening sockets behind.

Modules in one pytest process share its children, threads and ports. Without this check, leftovers would break a later
module that passes on its own or in another order.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from kit.own_children import own_children

END_SECONDS = 5.0
"""Maximum wait for things that are ending: a killed process, a thread after its last statement."""
POLL_SECONDS = 0.02
UNCHECKED = ("clients", "runtimes")
"""Folders of tests that run external programs, each in its own environment and pytest process."""


@dataclass(frozen=True, slots=True)
class Held:
    """Resources of this process other than the session's, with descriptions."""

    processes: dict[tuple[int, float], str]
    """By pid and start time."""
    threads: dict[int, str]
    """Non-daemon threads by identifier."""
    listeners: dict[int, str]
    """By inode."""

    def beyond(self, before: "Held") -> list[str]:
        """Returns the descriptions of resources that were not held before."""
        return [
            *(f"process {text}" for each, text in self.processes.items() if each not in before.processes),
            *(f"thread {text}" for each, text in self.threads.items() if each not in before.threads),
            *(f"listening socket {text}" for each, text in self.listeners.items() if each not in before.listeners),
        ]


_kept: set[tuple[int, float]] = set()


def keep(process_id: int) -> None:
    """Assigns a process to the session: its owner must stop it after the last test."""
    _kept.add((process_id, psutil.Process(process_id).create_time()))


def held_now() -> Held:
    """Returns the current resources of this process."""
    processes = {}
    for child in own_children():
        with suppress(psutil.NoSuchProcess):
            if (identity := (child.pid, child.create_time())) not in _kept:
                processes[identity] = f"{child.pid}: {_described(child)}"
    main = threading.main_thread()
    threads = {
        thread.ident or 0: thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main
    }
    return Held(processes, threads, dict(_listeners()))


def _described(child: psutil.Process) -> str:
    """Returns the command line; a zombie has only a name."""
    with suppress(psutil.ZombieProcess):
        return " ".join(child.cmdline()) or child.name()
    return f"{child.name()} (ended, never waited for)"


def _listeners() -> Iterator[tuple[int, str]]:
    """Yields the listening sockets among the open files of this process: TCP and Unix, Python's and gRPC's."""
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as each:
                if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield os.fstat(each.fileno()).st_ino, str(each.getsockname())


@dataclass(eq=False)
class LeftBehind:
    """The current module, and the resources before its first test."""

    module: Path | None = None
    before: Held = field(default_factory=lambda: Held({}, {}, {}))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """Records the resources before the first fixture of a module."""
        if item.path != self.module:
            self.module, self.before = item.path, held_now()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        """Fails the last test of a module after its last fixture if anything is left."""
        result = yield
        if nextitem is None or nextitem.path != item.path:
            self.module = None
            if item.path.parent.name not in UNCHECKED and (left := self.left()):
                pytest.fail(f"{item.path.name} left behind: {'; '.join(left)}", pytrace=False)
        return result

    def left(self) -> list[str]:
        """Returns what a module leaves behind, after a wait for things that are ending."""
        deadline = time.monotonic() + END_SECONDS
        while (left := held_now().beyond(self.before)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return left


def pytest_configure(config: pytest.Config) -> None:
    """Registers the check if a process can list its files."""
    if Path("/proc/self/fd").is_dir():
        config.pluginmanager.register(LeftBehind(), "weft-left-behind")
