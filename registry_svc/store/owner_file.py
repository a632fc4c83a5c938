"""Small files that only their owner may read: the pepper of API keys, the keys of secrets."""

import os
import stat
from pathlib import Path

from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.machine.file_replacement import lock_file, replace_file

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


def create_owner_file(path: Path, content: bytes, setting: str) -> bytes:
    """Writes a file durably, unless there is one: registries that start together use the same. Returns its content.

    Raises INVALID_ARGUMENT naming the setting if that fails.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            lock_file(folder, waits=True)
            if path.exists():
                return path.read_bytes()
            replace_file(path, content)
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise invalid_field(setting, f"{path} cannot be written: {error.strerror}") from error
    return content
