"""Writing a small file in one step, so that a crash leaves the old content or the new, never a part."""

import contextlib
import os
import tempfile
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` to `path`, on disk when this returns and readable by its owner alone. Raises OSError."""
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
    """Rename a damaged file to `<name>.bad`, in place of an earlier one; returns the new path, None if it cannot be."""
    aside = path.with_name(f"{path.name}.bad")
    try:
        path.replace(aside)
    except OSError:
        return None
    return aside
