"""Atomic replacement of small files: a crash leaves the old content or the new one, never a part."""

import contextlib
import os
import tempfile
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Writes `content` to `path`, synced to disk and readable only by its owner. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def set_aside(path: Path) -> Path | None:
    """Renames a damaged file to `<name>.bad`, replacing an earlier one. Returns the new path, None on failure."""
    aside = path.with_name(f"{path.name}.bad")
    try:
        path.replace(aside)
    except OSError:
        return None
    return aside
