"""Advisory locks on files, between the processes of one machine."""

import errno
from typing import IO, Any


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
