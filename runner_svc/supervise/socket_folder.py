"""The folder of an engine's Unix socket, and the removal of those that killed runners left behind.

A folder belongs to the process that holds the lock of its lock file, which the system releases when that process ends,
however it ends. A folder of this user whose lock is free is therefore stale, and a folder of a living runner never is.
"""

import os
import shutil
import stat
import tempfile
from contextlib import suppress
from itertools import islice
from pathlib import Path

from weft.kernel.file_lock import lock_file
from weft.kernel.log import get_logger

log = get_logger("weft.runner")

LOCK = "lock"
MAX_EXAMINED = 256
"""Folders that are examined in one start; the others are left for the next one."""
_PRIVATE = 0o600


class SocketFolder:
    """A folder that only this user can enter, locked by this process until it is removed."""

    def __init__(self, prefix: str) -> None:
        """Removes stale folders of this prefix, then makes one. Raises OSError."""
        for stale in remove_stale(prefix):
            log.info("removed the socket folder of a runner that was killed", folder=str(stale))
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        draft = self.path / f"{LOCK}.new"
        self._descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, _PRIVATE)
        lock_file(self._descriptor, waits=True)
        # Renamed when it is locked: a folder with a free lock is stale at any moment.
        draft.rename(self.path / LOCK)

    def remove(self) -> None:
        """Remove the folder. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def remove_stale(prefix: str) -> list[Path]:
    """Removes the stale folders of this prefix and this user; returns them. Others' folders are left as they are."""
    removed: list[Path] = []
    for folder in islice(Path(tempfile.gettempdir()).glob(f"{prefix}*"), MAX_EXAMINED):
        with suppress(OSError):
            if _is_own(folder) and _remove_if_stale(folder):
                removed.append(folder)
    return removed


def _is_own(folder: Path) -> bool:
    seen = folder.lstat()
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.geteuid()


def _remove_if_stale(folder: Path) -> bool:
    """Returns whether a folder was stale. Raises OSError where it has no lock file, or the lock is held."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        lock_file(descriptor)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
    return True
