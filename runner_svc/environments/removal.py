"""The removal of environments and of their earlier versions, and the lock under which an environment changes."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from runner_svc.environments.environment import EngineEnvironment
from runner_svc.environments.folder import EnvironmentFolder
from runner_svc.environments.receipts import claimed
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason

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


@contextmanager
def changing(environment: EngineEnvironment, folder: EnvironmentFolder) -> Iterator[None]:
    """Locks an environment for the block.

    Raises ALREADY_EXISTS when another process has locked it, and INVALID_ARGUMENT where the folder cannot be written or
    has something in its place that weft did not make.
    """
    link = folder.link(environment)
    if link.exists() and not link.is_symlink():
        raise invalid_field("NAME", f"{link} was not made by weft; move it away")
    try:
        with claimed(environment, folder) as alone:
            if not alone:
                raise WeftError(
                    Reason.ALREADY_EXISTS, f"another process installs or removes {environment.name}; wait for it"
                )
            yield
    except OSError as error:
        raise WeftError(
            Reason.INVALID_ARGUMENT,
            f"{error.filename or folder.root} cannot be used: {error.strerror}; choose another home with --home",
        ) from error


def remove_environment(environment: EngineEnvironment, folder: EnvironmentFolder, *, force: bool = False) -> bool:
    """Removes an environment; False: it was not installed.

    Raises RESOURCE_IN_USE, naming the processes, while it is used, unless `force`; and as `changing`.
    """
    link, versions = folder.link(environment), folder.versions(environment)
    with changing(environment, folder):
        used = processes_using(link.resolve(), link) if link.exists() else ()
        if used and not force:
            raise WeftError(
                Reason.RESOURCE_IN_USE,
                f"{environment.name} is used by {names_of(used)}; unload its models, or remove it with --force",
            )
        was_there = link.is_symlink()
        link.unlink(missing_ok=True)
        if versions.is_dir():
            shutil.rmtree(versions)
        return was_there


def remove_versions(environment: EngineEnvironment, folder: EnvironmentFolder, *, keep: Path | None) -> None:
    """Removes leftovers and earlier versions of an environment that is locked, except those that are still used."""
    versions = folder.versions(environment)
    for version in versions.iterdir() if versions.is_dir() else ():
        if version.resolve() != keep and not processes_using(version.resolve(), folder.link(environment)):
            shutil.rmtree(version, ignore_errors=True)
