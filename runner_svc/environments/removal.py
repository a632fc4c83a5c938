"""Removal of environments and old versions."""

import shutil
from contextlib import suppress
from pathlib import Path

import psutil

from runner_svc.environments.environment import EngineEnvironment
from runner_svc.environments.folder import EnvironmentFolder
from runner_svc.environments.receipts import changing
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

MAX_NAMED = 4
MAX_MAPS_BYTES = 64 * 1024**2


def processes_using(folder: Path, link: Path) -> list[str]:
    """Returns the user's processes, except this one, that use the environment version at `folder`, as texts.

    They run one of its programs or have loaded a library from it. A program started through the environment's link may
    use any version.
    """
    places = {folder / "bin", link / "bin"}
    found, own = [], psutil.Process().pid
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != own and (_runs(process, places) or _maps(process.pid, folder)):
                found.append(f"{process.name()} (pid {process.pid})")
    return found


def _runs(process: psutil.Process, places: set[Path]) -> bool:
    """Whether its command line starts with a program in these folders; the interpreter itself is outside of them."""
    return any(word.startswith("/") and Path(word).parent in places for word in process.cmdline()[:2])


def _maps(pid: int, folder: Path) -> bool:
    """Whether it maps a file of the environment, since engines may replace their command line."""
    prefix = f"{folder}/".encode()
    with Path(f"/proc/{pid}/maps").open("rb") as maps:
        return prefix in maps.read(MAX_MAPS_BYTES)


def remove_environment(environment: EngineEnvironment, folder: EnvironmentFolder, *, force: bool = False) -> bool:
    """Removes an environment; False: it was not installed.

    Raises RESOURCE_IN_USE naming the processes that use it, unless `force`; and as `changing`.
    """
    link, versions = folder.link(environment), folder.versions(environment)
    with changing(environment, folder):
        used = processes_using(link.resolve(), link) if link.exists() else []
        if used and not force:
            more = f" and {len(used) - MAX_NAMED} more" if len(used) > MAX_NAMED else ""
            raise WeftError(
                Reason.RESOURCE_IN_USE,
                f"{environment.name} is used by {', '.join(used[:MAX_NAMED])}{more}; unload its models, or remove it "
                "with --force",
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
