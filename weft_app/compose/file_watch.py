"""`weft up --watch`: notices that the files of a configuration have changed, once they rest."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError

WATCH_INTERVAL_SECONDS = 0.5
"""How often the files are looked at; a change counts once they look the same twice."""

Look = tuple[tuple[str, int, int, int], ...]


def look_of(files: Iterable[Path]) -> Look:
    """Returns what tells one version of files from another: name, inode, size and time of change."""
    found = []
    for file in files:
        try:
            facts = file.stat()
        except OSError:
            continue  # an editor may be replacing it
        found.append((str(file), facts.st_ino, facts.st_size, facts.st_mtime_ns))
    return tuple(found)


async def watch_files(files: Callable[[], Iterable[Path]], known: Look, changed: asyncio.Event, clock: Clock) -> None:
    """Sets `changed` when the files of the moment have changed, and rest. Runs until it is cancelled.

    `known` is their look before they were read, so that a change during the start counts, too.
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
