"""`weft mesh dump` and `weft mesh restore`: all state of a stopped mesh as one file."""

import os
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from weft_app.cli.options import DEFAULT_HOME, HomeOption, MeshConfigOption
from weft_app.cli.terminal import is_err_terminal, note, say
from weft_app.compose.environment import environment_of_mesh
from weft_app.compose.home import WeftHome
from weft_app.config.config import WeftConfig
from weft_app.config.loader import load_files

PROGRESS_SECONDS = 2.0


def dump(
    file: Annotated[Path, typer.Argument(help="The new file.")],
    from_home: Annotated[
        bool, typer.Option("--from-home", help="Dump the SQLite files of the home that weft.yaml no longer names.")
    ] = False,
    home: HomeOption = DEFAULT_HOME,
    config: MeshConfigOption = None,
) -> None:
    """Write the databases and key files of a stopped mesh to one file, as a backup or for another database.

    It has the keys, secrets with the key that decrypts them, join tokens, certificate authorities, settings,
    declarations, tasks, batches, files, responses, usage, request records and the audit log, but no models and no
    weft.yaml. Anyone who reads it can act as the mesh and read its secrets, so only its owner may (mode 0600).

    Example: weft mesh dump mesh.dump
    """
    from weft_app.compose.dump import dump_mesh  # noqa: PLC0415 - imports both services

    folder, loaded = _loaded(home, config)
    dump_mesh(loaded, folder, file, from_home=from_home, show=_Progress("written"))
    say(f"{file}: {file.stat().st_size} bytes; it contains secrets, so store it like a key\n")


def restore(
    file: Annotated[Path, typer.Argument(help="A file of weft mesh dump.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Delete what the databases have, and overwrite other key files.")
    ] = False,
    home: HomeOption = DEFAULT_HOME,
    config: MeshConfigOption = None,
) -> None:
    """Restore a dump into the databases of weft.yaml and this home, while the mesh is stopped.

    The dump is checked first, and nothing is written if it fails. Dumps of earlier releases are brought up to date.

    Example: weft mesh restore mesh.dump
    """
    from weft_app.compose.dump import restore_mesh  # noqa: PLC0415 - as above

    folder, loaded = _loaded(home, config)
    facts = restore_mesh(loaded, folder, file, replace=replace, show=_Progress("restored"))
    say(f"{facts.rows} rows and {len(facts.files)} key files restored; start the mesh with weft up\n")


def _loaded(home: Path, config: Path | None) -> tuple[WeftHome, WeftConfig]:
    folder = WeftHome(Path(home.expanduser().absolute()))
    below = partial(environment_of_mesh, environment=os.environ)
    return folder, load_files(folder.config_files(config), below=below)


class _Progress:
    """Notes about long work on a terminal."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._at = time.monotonic()

    def __call__(self, rows: int) -> None:
        now = time.monotonic()
        if now - self._at > PROGRESS_SECONDS and is_err_terminal():
            self._at = now
            note(f"{rows} rows {self._verb} so far")
