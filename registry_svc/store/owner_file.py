"""Small files that only their owner may read: the pepper of API keys, the keys of secrets."""

import os
import stat
from pathlib import Path

from weft.kernel.errors import invalid_field

_NOT_OWNER = stat.S_IRWXG | stat.S_IRWXO


def read_owner_file(path: Path, setting: str, *, max_bytes: int) -> bytes | None:
    """Returns the content, at most one byte more than `max_bytes`; None if there is no file.

    Raises INVALID_ARGUMENT naming the setting if others may read the file, or it cannot be read.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(max_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise invalid_field(setting, f"{path} cannot be read: {error.strerror}") from error
    if mode & _NOT_OWNER:
        raise invalid_field(setting, f"{path} is open to others (mode {stat.S_IMODE(mode):04o}); run: chmod 600 {path}")
    return content


def write_owner_file(path: Path, content: bytes, setting: str) -> None:
    """Writes a file durably. Raises INVALID_ARGUMENT naming the setting if that fails."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise invalid_field(setting, f"{path} cannot be written: {error.strerror}") from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
