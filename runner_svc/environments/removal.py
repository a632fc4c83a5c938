"""The removal of environments and of their earlier versions, and the lock under which an environment changes."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner_svc.environments.environment import EngineEnvironment
from runner_svc.environments.folder import EnvironmentFolder
from runner_svc.environments.receipts import claimed
from runner_svc.environments.use import names_of, processes_using
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason


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
