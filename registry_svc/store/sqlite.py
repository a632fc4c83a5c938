"""SQLite: owned by a lock file beside the database, tuned for commits that stay."""

import fcntl
import os
from pathlib import Path

from sqlalchemy import URL, Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.sql.opening import require_whole
from weft.sql.sqlite import file_of, make_private, tame


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
        """Release the lock, if it is held.

        The file stays: removing it would let a third process lock a new file while a second still waits for this one.
        """
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class SqliteDatabase:
    """See Database. The file's lock is held by the process, so it cannot be lost while the process lives."""

    driver_errors: tuple[type[Exception], ...] = ()

    def __init__(self, url: URL) -> None:
        self.url = url
        self._path = file_of(url)
        self._lock = None if self._path is None else FileLock(self._path.with_name(f"{self._path.name}.lock"))
        self._engine: AsyncEngine | None = None

    def take(self) -> AsyncEngine:
        """See Database.take."""
        if self._path is not None and self._lock is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            make_private(self._path)
        self._engine = create_async_engine(self.url, hide_parameters=True)
        tame(self._engine)
        return self._engine

    def require_whole(self, connection: Connection) -> None:
        """See Database.require_whole."""
        require_whole(connection, self.url)

    async def mark(self, connection: AsyncConnection) -> None:
        """See Database.mark: nothing, the lock says it all."""

    async def release(self) -> None:
        """See Database.release."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await engine.dispose()
        if self._lock is not None:
            self._lock.release()

    def explain(self, error: Exception) -> str:
        """See Database.explain. SQLite's messages name tables and columns, never values."""
        return f"{self.url.database}: {error}"
