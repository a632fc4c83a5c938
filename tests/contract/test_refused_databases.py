"""A database file that cannot be used at start: one sentence with the file, what is wrong with it, and what to do."""

import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from registry_svc.mesh.store import SqlStore
from router_svc.store.database import RouterDatabase
from weft import __version__
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

PAGE_BYTES = 4096
Damage = Callable[[Path], None]
OPENED: dict[str, Callable[[str], SqlStore | RouterDatabase]] = {"registry": SqlStore, "router": RouterDatabase}


@asynccontextmanager
async def _open(owner: str, path: Path) -> AsyncIterator[None]:
    database = OPENED[owner](f"sqlite:///{path}")
    await database.open()
    try:
        yield
    finally:
        await database.close()


def _flipped_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[3] ^= 0x10
    path.write_bytes(content)


def _garbage_page(path: Path) -> None:
    """A page of a table, not the first one: opening alone does not read it."""
    content = bytearray(path.read_bytes())
    content[PAGE_BYTES : 2 * PAGE_BYTES] = os.urandom(PAGE_BYTES)
    path.write_bytes(content)


def _cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: PAGE_BYTES * 3 // 2])


def _foreign(path: Path) -> None:
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + os.urandom(9_000))


def _of_another_program(path: Path) -> None:
    path.unlink()
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE bookmarks (url TEXT)")
    other.commit()
    other.close()


def _newer(path: Path) -> None:
    _set_revision(path, "9999")


def _older(path: Path) -> None:
    _set_revision(path, "0001")


def _set_revision(path: Path, revision: str) -> None:
    database = sqlite3.connect(path)
    for (table,) in database.execute("SELECT name FROM sqlite_master WHERE name LIKE '%alembic_version'").fetchall():
        database.execute(f"UPDATE {table} SET version_num = '{revision}'")
    database.commit()
    database.close()


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


FAULTS: dict[Damage, str] = {
    _flipped_header: "is no database (SQLITE_NOTADB); restore it from a backup, or move it away",
    _garbage_page: "is damaged (SQLITE_CORRUPT",
    _cut_short: "is damaged (SQLITE_CORRUPT",
    _foreign: "is no database (SQLITE_NOTADB); restore it from a backup",
    _of_another_program: "it belongs to another program (its tables: bookmarks); move it away, or name another file",
    _newer: f"it has the schema 9999, which weft {__version__} does not know (its newest is 00",
    _older: "run the release that wrote it, or begin with a new database",
    _folder: "cannot be used: Is a directory; let this user read and write it",
}


@pytest.mark.parametrize("owner", OPENED)
@pytest.mark.parametrize("damage", FAULTS, ids=lambda damage: damage.__name__.strip("_"))
async def test_unusable_database_is_one_sentence_with_its_file(tmp_path: Path, owner: str, damage: Damage) -> None:
    path = tmp_path / f"{owner}.db"
    async with _open(owner, path):
        pass
    damage(path)
    with pytest.raises(WeftError) as refused:
        async with _open(owner, path):
            pass
    assert refused.value.reason is Reason.SERVICE_UNAVAILABLE
    assert refused.value.message.startswith(f"the {owner}'s database {path}")
    assert FAULTS[damage] in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("owner", OPENED)
async def test_intact_database_reopens(tmp_path: Path, owner: str) -> None:
    """The control: nothing but the damage is refused."""
    for _ in range(2):
        async with _open(owner, tmp_path / "own.db"):
            pass


async def test_registry_and_router_can_share_a_file(tmp_path: Path) -> None:
    """Each finds the other's tables, and those are no other program's."""
    async with _open("registry", tmp_path / "one.db"):
        pass
    async with _open("router", tmp_path / "one.db"):
        pass
