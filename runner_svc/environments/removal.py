"""Removal of environments and old versions."""

import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

from runner_svc.environments.environment import EngineEnvironment
from runner_svc.environments.folder import EnvironmentFolder
from runner_svc.environments.installed_environments import changing
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

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


def use_version(environment: EngineEnvironment, folder: EnvironmentFolder, version: Path) -> None:
    """Makes a kept version the one that engines use from their next start. Raises as `changing`."""
    with changing(environment, folder):
        folder.point(environment, version.resolve())


def remove_version(
    environment: EngineEnvironment, folder: EnvironmentFolder, version: Path, *, force: bool = False
) -> None:
    """Removes one kept version; the environment is not installed if it was in use. Raises as `remove_environment`."""
    link = folder.link(environment)
    with changing(environment, folder):
        if not force:
            _require_unused(environment, processes_using(version.resolve(), version))
        if link.exists() and link.resolve() == version.resolve():
            link.unlink()
        shutil.rmtree(version)


def _require_unused(environment: EngineEnvironment, used: list[str]) -> None:
    if used:
        more = f" and {len(used) - MAX_NAMED} more" if len(used) > MAX_NAMED else ""
        raise WeftError(
            Reason.RESOURCE_IN_USE,
            f"{environment.name} is used by {', '.join(used[:MAX_NAMED])}{more}; unload its models, or remove it "
            "with --force",
        )


def remove_environment(environment: EngineEnvironment, folder: EnvironmentFolder, *, force: bool = False) -> bool:
    """Removes an environment with all its versions; False: it was not installed.

    Raises RESOURCE_IN_USE naming the processes that use it, unless `force`; and as `changing`.
    """
    link, versions = folder.link(environment), folder.versions(environment)
    with changing(environment, folder):
        if link.exists() and not force:
            _require_unused(environment, processes_using(link.resolve(), link))
        was_there = link.is_symlink()
        link.unlink(missing_ok=True)
        if versions.is_dir():
            shutil.rmtree(versions)
        shutil.rmtree(folder.work(environment), ignore_errors=True)
        return was_there


def remove_versions(environment: EngineEnvironment, folder: EnvironmentFolder, *, keep: Collection[Path]) -> None:
    """Removes leftovers and old versions of a locked environment, except `keep` and those still in use."""
    versions = folder.versions(environment)
    for version in versions.iterdir() if versions.is_dir() else ():
        if version.resolve() not in keep and not processes_using(version.resolve(), folder.link(environment)):
            shutil.rmtree(version, ignore_errors=True)
