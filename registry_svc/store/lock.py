"""One registry per SQLite file."""

import fcntl
import os
from pathlib import Path

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


class FileLock:
    """An exclusive lock on a file, given up by `release` and, whatever happens, by the end of the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock; raises ALREADY_EXISTS when another process or registry holds it."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise WeftError(
                Reason.ALREADY_EXISTS,
                "another registry runs on this database; stop it, or give this one a database of its own",
            ) from error
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock up, if it is held.

        The file stays: removing it would let a third process lock a new file while a second still waits for this one.
        """
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
