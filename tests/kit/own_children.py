"""The processes started by tests, without those of the test session; whether a process lives."""

import psutil

from kit.warm_server import NAME

OF_THE_SESSION = ("postgres", NAME)
"""Name prefixes of processes that run until the session ends."""


def own_children(*, recursive: bool = False) -> list[psutil.Process]:
    """Returns the running and zombie children of this process."""
    return [child for child in psutil.Process().children(recursive=recursive) if not _belongs_to_session(child)]


def lives(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _belongs_to_session(child: psutil.Process) -> bool:
    try:
        return child.name().startswith(OF_THE_SESSION)
    except psutil.NoSuchProcess:
        return False
