"""Files that commands about images and sound read and write."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, BinaryIO, NoReturn

import typer

from weft.kernel.errors import FieldError, WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft_app.cli.options import EXIT_INTERRUPTED, note

OUTPUT_OPTION = "--output"
STANDARD = "-"
"""Stands for standard input or output."""
MAX_MEDIA_BYTES = 60 * 1024 * 1024
"""Largest file that one request carries; a message of the mesh has at most 64 MiB."""
MAX_TIMEOUT_SECONDS = 86_400.0
DetachOption = Annotated[
    bool, typer.Option("--detach", help="Submit a durable task, print its id, and exit; --fetch writes its result.")
]
FetchOption = Annotated[
    str, typer.Option("--fetch", metavar="TASK", help="Wait for a task of --detach, and write its result.")
]
_MAX_SLUG_CHARS = 48
_PART = ".part"


def read_media(path: Path, field: str, advice: str = "") -> bytes:
    """Returns the bytes of a file, or of standard input for `-`.

    Raises INVALID_ARGUMENT naming `field` for one that is missing or empty, REQUEST_TOO_LARGE above MAX_MEDIA_BYTES.
    """
    try:
        if str(path) == STANDARD:
            data = sys.stdin.buffer.read(MAX_MEDIA_BYTES + 1)
        else:
            with path.open("rb") as file:
                data = file.read(MAX_MEDIA_BYTES + 1)
    except OSError as error:
        raise invalid_field(field, f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    if not data:
        raise invalid_field(field, f"{path} is empty")
    if len(data) > MAX_MEDIA_BYTES:
        message = f"{path} is larger than {MAX_MEDIA_BYTES // 1024**2} MiB{advice}"
        raise FieldError(field, message, Reason.REQUEST_TOO_LARGE)
    return data


def numbered(path: Path, count: int) -> list[Path]:
    """Returns the paths of several files: NAME-1.png, NAME-2.png ...; the path itself for one."""
    if count == 1:
        return [path]
    return [path.with_name(f"{path.stem}-{number}{path.suffix}") for number in range(1, count + 1)]


def free_paths(stem: str, suffix: str, count: int) -> list[Path]:
    """Returns paths in the current folder of which no file exists: STEM.png, else STEM_2.png ..."""
    number = 1
    while True:
        tail = "" if number == 1 else f"_{number}"
        paths = numbered(Path(f"{stem}{tail}.{suffix}"), count)
        if not any(map(os.path.lexists, paths)):
            return paths
        number += 1


def slug(text: str) -> str:
    """Returns a text as the stem of a file's name; `image` for one without letters and digits."""
    words = re.sub(r"[\W_]+", "-", text.lower()).strip("-")
    return words[:_MAX_SLUG_CHARS].strip("-") or "image"


def require_writable(paths: list[Path], *, force: bool) -> None:
    """Raises ALREADY_EXISTS for a file that exists, unless `force`, and INVALID_ARGUMENT for a folder that does not."""
    for path in paths:
        if not path.parent.is_dir():
            raise invalid_field(OUTPUT_OPTION, f"there is no folder {path.parent}")
        if path.is_dir():
            raise invalid_field(OUTPUT_OPTION, f"{path} is a folder; name a file")
        if os.path.lexists(path) and not force:
            raise WeftError(Reason.ALREADY_EXISTS, f"{path} exists; --force overwrites it, -o names another file")


@contextmanager
def written(path: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Yields a file that has its name only when the block ends well. Raises as `require_writable`.

    Until then it is PATH.part, which is removed when the block fails.
    """
    part = path.with_name(path.name + _PART)
    try:
        with part.open("wb") as file:
            yield file
        require_writable([path], force=force)
        part.replace(path)
    except OSError as error:
        raise invalid_field(OUTPUT_OPTION, f"{path} cannot be written: {(error.strerror or '').lower()}") from error
    finally:
        with suppress(OSError):
            part.unlink()


def stopped(what: str, state: str = "cancelled") -> NoReturn:
    """Ends a command that Ctrl-C stopped: says that the request was cancelled, and what became of its result."""
    sys.stderr.write("\n")
    note(f"{state}; {what}")
    raise typer.Exit(EXIT_INTERRUPTED)
