"""CPU time and memory of process trees, by what each process is."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import psutil

from bench.contender import BACKEND_ROLE, Contender

MB = 1_000_000


@dataclass(frozen=True, slots=True)
class CpuSnapshot:
    """CPU seconds (user and system) used so far, by process id, and what each process is."""

    seconds: Mapping[int, float]
    roles: Mapping[int, str]

    def since(self, earlier: "CpuSnapshot") -> dict[str, float]:
        """CPU seconds by role between two snapshots; a process that ended in between counts nothing."""
        used: dict[str, float] = {}
        for pid, seconds in self.seconds.items():
            role = self.roles[pid]
            used[role] = used.get(role, 0.0) + seconds - earlier.seconds.get(pid, 0.0)
        return used


def roles_of_tree(root: psutil.Process, contender: Contender) -> dict[int, str]:
    """Every process under `root` by id, with its role; without a marker of its own a child is what its parent is."""
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


def snapshot(*trees: tuple[psutil.Process, Contender]) -> CpuSnapshot:
    """The CPU time of these trees now. A pid that is in several trees has the role the first one gives it."""
    seconds: dict[int, float] = {}
    roles: dict[int, str] = {}
    for root, contender in trees:
        for pid, role in roles_of_tree(root, contender).items():
            try:
                times = psutil.Process(pid).cpu_times()
            except psutil.NoSuchProcess:
                continue
            seconds.setdefault(pid, times.user + times.system)
            roles.setdefault(pid, role)
    return CpuSnapshot(seconds, roles)


def tree_megabytes(root: psutil.Process, contender: Contender) -> float:
    """Resident memory of the contender's processes without backends."""
    pids = [pid for pid, role in roles_of_tree(root, contender).items() if role != BACKEND_ROLE]
    return sum(psutil.Process(pid).memory_info().rss for pid in pids) / MB


def backend_of(root: psutil.Process, contender: Contender) -> psutil.Process | None:
    """The first backend process in the contender's tree; None where its backend was started by the bench."""
    roles = roles_of_tree(root, contender)
    found = next((pid for pid, role in roles.items() if role == BACKEND_ROLE), None)
    return None if found is None else psutil.Process(found)


def listening_port(process: psutil.Process) -> int:
    """The TCP port a process listens on. Raises LookupError when it listens on none."""
    for connection in process.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            return int(connection.laddr.port)
    raise LookupError(f"process {process.pid} listens on no TCP port")
