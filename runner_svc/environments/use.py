"""The processes that use an environment."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

MAX_NAMED = 4
MAX_MAPS_BYTES = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class UsingProcess:
    """A process that runs a program of an environment, or has loaded a library from it."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


def processes_using(folder: Path, link: Path) -> tuple[UsingProcess, ...]:
    """Returns the processes of this user, except this one, that use the version of an environment at `folder`.

    A program that was started by the environment's link may use any version.
    """
    places = {folder / "bin", link / "bin"}
    found, own = [], psutil.Process().pid
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != own and (_runs(process, places) or _maps(process.pid, folder)):
                found.append(UsingProcess(process.pid, process.name()))
    return tuple(found)


def names_of(processes: tuple[UsingProcess, ...]) -> str:
    """Returns the processes as text."""
    more = f" and {len(processes) - MAX_NAMED} more" if len(processes) > MAX_NAMED else ""
    return ", ".join(map(str, processes[:MAX_NAMED])) + more


def _runs(process: psutil.Process, places: set[Path]) -> bool:
    """Whether its command line begins with a program in one of these folders: the interpreter itself lies elsewhere."""
    return any(word.startswith("/") and Path(word).parent in places for word in process.cmdline()[:2])


def _maps(pid: int, folder: Path) -> bool:
    """Whether a file of the environment is mapped: engines may replace their command line."""
    prefix = f"{folder}/".encode()
    with Path(f"/proc/{pid}/maps").open("rb") as maps:
        return prefix in maps.read(MAX_MAPS_BYTES)
