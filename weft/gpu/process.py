"""Processes identified by id and start time, which are unique together."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from weft.gpu.snapshot import ProcessId

MAX_TREE_PROCESSES = 4_096
_PROC = Path("/proc")
_TICKS_PER_SECOND = 100
"""Unit of start times on other systems; USER_HZ of Linux."""
_ENDED_STATES = frozenset("ZXx")


class _Stat(NamedTuple):
    state: str
    thread_count: int
    start_ticks: int


def process_id_of(pid: int) -> ProcessId | None:
    """Returns the running process with this id; None if there is none, or it is a zombie."""
    if sys.platform != "linux":
        return _asked_elsewhere(pid)
    stat = _stat(pid)
    return ProcessId(pid, stat.start_ticks) if stat is not None and _lives(stat) else None


def is_alive(process: ProcessId) -> bool:
    """Whether this process runs. A zombie does not, since it holds no memory."""
    return process_id_of(process.pid) == process


def tree_of(root: ProcessId) -> tuple[ProcessId, ...]:
    """Returns the process and its running descendants, sorted, at most MAX_TREE_PROCESSES; empty if it does not run.

    Descendants with parents that have ended are not found, so callers keep those of earlier calls.
    """
    if not is_alive(root):
        return ()
    found = {root}
    with suppress(psutil.Error):
        for child in psutil.Process(root.pid).children(recursive=True)[: MAX_TREE_PROCESSES - 1]:
            process = process_id_of(child.pid)
            if process is not None:
                found.add(process)
    return tuple(sorted(found))


def _lives(stat: _Stat) -> bool:
    # A process looks like a zombie if its first thread has ended while others continue.
    return stat.state not in _ENDED_STATES or stat.thread_count > 1


def _stat(pid: int) -> _Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text("utf-8", "replace")
    except OSError:
        return None
    # The program's name is in parentheses and may contain any character, including parentheses.
    fields = text.rpartition(")")[2].split()
    try:
        return _Stat(state=fields[0], thread_count=int(fields[17]), start_ticks=int(fields[19]))
    except (IndexError, ValueError):
        return None


def _asked_elsewhere(pid: int) -> ProcessId | None:
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return ProcessId(pid, int(process.create_time() * _TICKS_PER_SECOND))
    except (psutil.Error, ValueError):
        return None
