"""Removal of environments and old versions, and the lock for changing an environment."""

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
    """Returns the user's processes, except this one, that use the environment version at `folder`.

    A program started through the environment's link may use any version.
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
    """Whether its command line starts with a program in these folders; the interpreter itself is outside of them."""
    return any(word.startswith("/") and Path(word).parent in places for word in process.cmdline()[:2])


def _maps(pid: int, folder: Path) -> bool:
    """Whether it maps a file of the environment, since engines may replace their command line."""
    prefix = f"{folder}/".encode()
    with Path(f"/proc/{pid}/maps").open("rb") as maps:
        return prefix in maps.read(MAX_MAPS_BYTES)


@contextmanager
def changing(environment: EngineEnvironment, folder: EnvironmentFolder) -> Iterator[None]:
    """Locks an environment for the block.

    Raises ALREADY_EXISTS if another process holds the lock, and INVALID_ARGUMENT if the folder is not writable or its
    place is taken by something that weft did not create.
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

    Raises RESOURCE_IN_USE naming the processes that use it, unless `force`; and as `changing`.
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
    """Removes leftovers and old versions of a locked environment, except those still in use."""
    versions = folder.versions(environment)
    for version in versions.iterdir() if versions.is_dir() else ():
        if version.resolve() != keep and not processes_using(version.resolve(), folder.link(environment)):
            shutil.rmtree(version, ignore_errors=True)
