"""CPU time and memory of process trees, by what each process is."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from bench.contender import BACKEND_ROLE, Contender

MB = 1_000_000


def roles_of_tree(root: psutil.Process, contender: Contender) -> dict[int, str]:
    """Return the role of every process under `root` by id; a child without a marker has its parent's role."""
    return dict(_walk(root, contender, contender.main_role))


def _walk(process: psutil.Process, contender: Contender, inherited: str) -> Iterator[tuple[int, str]]:
    try:
        line, children = " ".join(process.cmdline()), process.children()
    except psutil.NoSuchProcess:
        return
    role = next((role for marker, role in contender.roles.items() if marker in line), inherited)
    yield process.pid, role
    for child in children:
        yield from _walk(child, contender, role)


def cpu_seconds(*trees: tuple[psutil.Process, Contender]) -> dict[tuple[int, str], float]:
    """CPU seconds (user and system) of these trees so far, by process id and role.

    A process that is in several trees has the role that the first one gives it.
    """
    roles = {pid: role for tree in reversed(trees) for pid, role in roles_of_tree(*tree).items()}
    found = {}
    for pid, role in roles.items():
        with suppress(FileNotFoundError, ProcessLookupError):
            found[pid, role] = sum(map(_thread_seconds, Path(f"/proc/{pid}/task").iterdir()))
    return found


def _thread_seconds(task: Path) -> float:
    # In nanoseconds; the times of `psutil` have steps of 10 ms, which is a tenth of what a burst costs.
    return int((task / "schedstat").read_text("ascii").split()[0]) / 1e9


def used_by_role(before: Mapping[tuple[int, str], float], after: Mapping[tuple[int, str], float]) -> dict[str, float]:
    """CPU seconds by role between two moments; a process that ended in between counts nothing."""
    used: dict[str, float] = {}
    for (pid, role), seconds in after.items():
        used[role] = used.get(role, 0.0) + seconds - before.get((pid, role), 0.0)
    return used


def tree_megabytes(root: psutil.Process, contender: Contender) -> float:
    """Resident memory of the contender's processes without backends."""
    pids = [pid for pid, role in roles_of_tree(root, contender).items() if role != BACKEND_ROLE]
    return sum(psutil.Process(pid).memory_info().rss for pid in pids) / MB


def backend_of(root: psutil.Process, contender: Contender) -> psutil.Process | None:
    """The first backend process in the contender's tree; None where its backend was started by the bench."""
    roles = roles_of_tree(root, contender)
    found = next((pid for pid, role in roles.items() if role == BACKEND_ROLE), None)
    return None if found is None else psutil.Process(found)
