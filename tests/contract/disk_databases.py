"""A program on a failing disk: databases of the router and the registry, whose every disk call fails once.

python disk_databases.py FOLDER ERROR CALLS IS_TORN

It ends with an error that names the call, if an acknowledged write is missing, a refusal is not the agreed one, or the
store does not go on when the disk is good again.
"""

import asyncio
import errno
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from registry_svc.mesh.store import SqlStore
from router_svc.store.database import RouterDatabase
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.sql.store import Store
from weft_testing.failing_disk import EVERY, FailingDisk

WRITES = 4
SLOW_SECONDS = 0.3
"""Of a sync."""
_PUT = "INSERT INTO {table} VALUES (:name, :content)"
TABLE = "kept"


def _opened_router(folder: Path) -> Store:
    return RouterDatabase(f"sqlite:///{folder / 'own.db'}", promise_file=folder / "own.promised")


def _opened_registry(folder: Path) -> Store:
    return SqlStore(f"sqlite:///{folder / 'own.db'}")


OWNERS: dict[str, Callable[[Path], Store]] = {"router": _opened_router, "registry": _opened_registry}


async def make(owner: str, folder: Path) -> None:
    """A database with a table of its own beside those of its owner."""
    store = OWNERS[owner](folder)
    await store.open()
    await store.run(lambda tx: tx.execute(f"CREATE TABLE {TABLE} (name TEXT PRIMARY KEY, content BLOB NOT NULL)"))
    await store.close()


async def put(store: Store, name: str) -> None:
    """A write of three pages."""
    await store.run(lambda tx: tx.execute(_PUT.format(table=TABLE), name=name, content=name.encode() * 2_000))


async def names_in(store: Store) -> set[str]:
    """The names whose content is whole."""
    rows = await store.read(lambda tx: tx.rows(f"SELECT name, content FROM {TABLE}"))
    return {row.name for row in rows if bytes(row.content) == row.name.encode() * 2_000}


def require_refusal(error: WeftError, folder: Path, *, opening: bool) -> None:
    assert error.reason is Reason.SERVICE_UNAVAILABLE, error
    if opening:
        assert str(folder / "own.db") in error.message, error.message
    else:
        assert error.retry_after_seconds, error


async def use(owner: str, folder: Path) -> set[str]:
    """Opens, writes, closes. Returns what was acknowledged."""
    store, acknowledged = OWNERS[owner](folder), set()
    try:
        await store.open()
    except WeftError as error:
        require_refusal(error, folder, opening=True)
        return set()
    for number in range(WRITES):
        try:
            await put(store, f"w{number}")
            acknowledged.add(f"w{number}")
        except WeftError as error:
            require_refusal(error, folder, opening=False)
    await store.close()
    return acknowledged


async def check(owner: str, folder: Path, acknowledged: set[str]) -> None:
    """With a good disk: everything that was acknowledged is there, no loss is reported, and writes work."""
    store = OWNERS[owner](folder)
    await store.open()
    assert acknowledged <= await names_in(store), (acknowledged, await names_in(store))
    assert not isinstance(store, RouterDatabase) or store.loss is None, store
    await put(store, "last")
    assert "last" in await names_in(store)
    await store.close()


async def sweep(owner: str, folder: Path, *, error: int, calls: int, is_torn: bool) -> int:
    """Returns how many calls there are."""
    disk, template, number = FailingDisk.of_this_process(), folder / f"{owner}.template", 0
    await make(owner, template)
    while True:
        number += 1
        place = folder / f"{owner}.{number}"
        shutil.copytree(template, place)
        with disk.watching(place, error=error, fails_at=number, calls=calls, is_torn=is_torn):
            try:
                acknowledged = await use(owner, place)
            except BaseException as found:
                raise AssertionError(f"{owner}: call {number} of the disk") from found
            if disk.seen < number:
                return number - 1
        try:
            await check(owner, place, acknowledged)
        except BaseException as found:
            raise AssertionError(f"{owner}: after call {number} of the disk") from found
        shutil.rmtree(place)


async def use_slowly(owner: str, folder: Path) -> None:
    """Each sync takes long: everything is acknowledged, only later."""
    await make(owner, folder)
    with FailingDisk.of_this_process().watching(folder, pause_seconds=SLOW_SECONDS):
        acknowledged = await use(owner, folder)
    assert len(acknowledged) == WRITES, acknowledged
    await check(owner, folder, acknowledged)


if __name__ == "__main__":
    for each in OWNERS:
        asyncio.run(use_slowly(each, Path(sys.argv[1]) / f"{each}.slow"))
        count = asyncio.run(
            sweep(
                each,
                Path(sys.argv[1]),
                error=getattr(errno, sys.argv[2]),
                calls=EVERY if sys.argv[3] == "all" else 1,
                is_torn=sys.argv[4] == "torn",
            )
        )
        sys.stdout.write(f"{each} {count}\n")
