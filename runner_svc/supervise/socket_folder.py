"""The folder of an engine's Unix socket, and the removal of folders that killed runners left behind.

A folder belongs to the process that holds its lock file's lock, which the system releases when the process ends for any
reason. So a folder of this user with a free lock is stale, and a folder of a living runner never is.
"""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.file_replacement import lock_file
from weft.kernel.telemetry.log import get_logger

log = get_logger("weft.runner")

LOCK = "lock"
MAX_EXAMINED = 256
"""Maximum number of folders examined per start; others are left for the next one."""
_PRIVATE = 0o600


class SocketFolder:
    """A folder that only this user can enter, locked by this process until it is removed."""

    def __init__(self, prefix: str, names: Iterable[str] = ()) -> None:
        """Removes stale folders with this prefix, then creates one that contains folders of these names.

        Raises CONNECT_FAILED.
        """
        for stale in remove_stale(prefix):
            log.info("removed the socket folder of a runner that was killed", folder=str(stale))
        try:
            self._create(prefix, names)
        except OSError as error:
            message = f"no folder for its files could be made: {error.strerror}"
            raise WeftError(Reason.CONNECT_FAILED, message) from error

    def _create(self, prefix: str, names: Iterable[str]) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        draft, self._descriptor = self.path / f"{LOCK}.new", -1
        try:
            self._descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, _PRIVATE)
            lock_file(self._descriptor, waits=True)
            # Renamed after it is locked, because a folder with a free lock is stale at any moment.
            draft.rename(self.path / LOCK)
            for name in names:
                (self.path / name).mkdir()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Removes the folder. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def remove_stale(prefix: str) -> list[Path]:
    """Removes and returns the stale folders with this prefix of this user. Others' folders are not touched."""
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
    """Removes a folder if it is stale; returns whether it was. Raises OSError if its lock file is missing or locked."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        lock_file(descriptor)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
    return True
