"""`weft up --watch`: detects changed configuration files once writing has ended."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.time.clock import Clock

WATCH_INTERVAL_SECONDS = 0.5
"""Interval of checks. A change counts once two checks in a row see the same files."""

Look = tuple[tuple[str, int, int, int], ...]


def look_of(files: Iterable[Path]) -> Look:
    """Returns name, inode, size and modification time of each file."""
    found = []
    for file in files:
        try:
            facts = file.stat()
        except OSError:
            continue  # an editor may be replacing it
        found.append((str(file), facts.st_ino, facts.st_size, facts.st_mtime_ns))
    return tuple(found)


async def watch_files(files: Callable[[], Iterable[Path]], known: Look, changed: asyncio.Event, clock: Clock) -> None:
    """Sets `changed` after each change of the files once they are stable. Runs until cancelled.

    `known` is the state before the files were read, so that changes during the start count, too.
    """
    seen = known
    while True:
        await clock.sleep(WATCH_INTERVAL_SECONDS)
        now = await asyncio.to_thread(_look, files)
        if now == seen != known:
            known = now
            changed.set()
        seen = now


def _look(files: Callable[[], Iterable[Path]]) -> Look:
    try:
        return look_of(files())
    except WeftError:  # a variable names a file that is being replaced
        return ()
