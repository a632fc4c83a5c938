"""Atomic replacement of small files, which a crash never leaves half-written, and locks on files."""

import contextlib
import errno
import os
import tempfile
from pathlib import Path
from typing import IO, Any


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


def lock_file(file: int | IO[Any], *, is_shared: bool = False, waits: bool = False) -> None:
    """Locks an open file until it is closed, exclusively or shared; with `waits`, blocks until the lock is free.

    Raises BlockingIOError if another process holds a lock, and OSError with ENOSYS on a system without file locks.
    """
    try:
        import fcntl  # noqa: PLC0415 - Windows lacks it, and has commands that lock nothing
    except ImportError:
        raise OSError(errno.ENOSYS, "files cannot be locked on this system") from None
    mode = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    fcntl.flock(file, mode if waits else mode | fcntl.LOCK_NB)
