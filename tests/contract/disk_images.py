"""A program on a recorded disk: what is left of a database after each of its calls, copied, killed or cut off there.

python disk_images.py FOLDER [unsynced]

It ends with an error that names the call, if a database does not open or lacks an acknowledged write. `unsynced`, the
control: commits do not wait for the disk.
"""

import asyncio
import shutil
import sqlite3
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from disk_databases import OWNERS, TABLE, check, make, put

from weft.sql import connections
from weft_testing.failing_disk import DiskImage, FailingDisk, entries, write_image

WRITES = 12
"""Several of them at once are committed together."""
AT_ONCE = 3
EVERY_NTH = 20
"""Every nth image is opened by its service, the others by SQLite alone."""
ACKNOWLEDGED = "acknowledged"
KEPT = (0.0, 0.5, 0.9)
"""Shares of the writes without a sync that a power cut leaves."""


async def load(owner: str, folder: Path) -> None:
    """Writes, and notes what was acknowledged, in the record as well. A checkpoint comes in the middle."""
    store = OWNERS[owner](folder)
    await store.open()
    with (folder / ACKNOWLEDGED).open("ab", buffering=0) as noted:

        async def write(number: int) -> None:
            await put(store, f"w{number}")
            noted.write(b"w%d\n" % number)

        for first in range(0, WRITES, AT_ONCE):
            await asyncio.gather(*(write(number) for number in range(first, first + AT_ONCE)))
            if first == WRITES // 2:
                await store.attempt(lambda tx: tx.rows("PRAGMA wal_checkpoint(PASSIVE)"), writes=False)
    await store.close()


def require_whole(folder: Path, acknowledged: set[str]) -> None:
    with closing(sqlite3.connect(folder / "own.db")) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        rows = database.execute(f"SELECT name, content FROM {TABLE}").fetchall()
    found = {name for name, content in rows if content == name.encode() * 2_000}
    assert acknowledged <= found, acknowledged - found


def images(owner: str, folder: Path) -> int:
    """Returns the number of images."""
    place, record, target = folder / owner, folder / f"{owner}.record", folder / f"{owner}.image"
    asyncio.run(make(owner, place))
    begin = {str(path): path.read_bytes() for path in place.iterdir() if path.is_file()}
    with FailingDisk.of_this_process().watching(place, record=record):
        asyncio.run(load(owner, place))
    disk, count = DiskImage(begin), 0
    for number, entry in enumerate(entries(record), 1):
        disk.apply(entry)
        killed = disk.after_a_kill()
        acknowledged = set(killed.get(str(place / ACKNOWLEDGED), b"").decode().split())
        cut = disk.after_a_power_cut(KEPT[number % len(KEPT)])
        for what, image in (("a copy", killed), ("a power cut", cut)):
            count += 1
            shutil.rmtree(target, ignore_errors=True)
            write_image(_without_memory(image), place, target)
            try:
                require_whole(target, acknowledged)
                if count % EVERY_NTH == 0:
                    asyncio.run(check(owner, target, acknowledged))
            except BaseException as found:
                raise AssertionError(f"{owner}: {what} after call {number}: {entry.call.name} {entry.path}") from found
    return count


def _without_memory(image: Mapping[str, bytes]) -> dict[str, bytes]:
    """Without the index of the log, which is shared memory, and made again."""
    return {path: content for path, content in image.items() if not path.endswith("-shm")}


if __name__ == "__main__":
    if "unsynced" in sys.argv[2:]:
        connections._PRAGMAS = (*connections._PRAGMAS[:3], "synchronous=OFF")
    for each in OWNERS:
        sys.stdout.write(f"{each} {images(each, Path(sys.argv[1]))}\n")
