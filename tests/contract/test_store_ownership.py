"""One registry per database, who comes after it, and what its log may say."""

import asyncio
from pathlib import Path

from stored_values import declared_model, stored

from registry_svc.mesh.store import SqlStore, StoredMesh
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

pytest_plugins = ("database_fixtures",)


async def test_next_owner_reads_what_was_saved(store: SqlStore, database_url: str) -> None:
    await store.save_session(stored())
    await store.save_documents([declared_model("m1")])
    await store.close()
    again = SqlStore(database_url)
    await again.open()
    assert await again.load() == StoredMesh(sessions=(stored(),), documents=(declared_model("m1"),))
    await again.close()


async def test_one_of_two_concurrent_opens_wins(database_url: str) -> None:
    stores = [SqlStore(database_url), SqlStore(database_url)]
    outcomes = await asyncio.gather(*(each.open() for each in stores), return_exceptions=True)
    refused = [each for each in outcomes if each is not None]
    assert [each.reason for each in refused if isinstance(each, WeftError)] == [Reason.ALREADY_EXISTS]
    winner = stores[outcomes.index(None)]
    await winner.save_session(stored())
    assert (await winner.load()).sessions == (stored(),)
    for each in stores:
        await each.close()


async def test_sqlite_commits_are_durable_and_foreign_keys_hold(sqlite_url: str) -> None:
    store = SqlStore(sqlite_url)
    await store.open()
    pragmas = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
    settings = await store.run(lambda tx: {pragma: tx.value(f"PRAGMA {pragma}") for pragma in pragmas})
    await store.close()
    assert settings == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 5000}


async def test_sqlite_file_is_accessible_only_to_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    store = SqlStore(f"sqlite:///{path}")
    await store.open()
    await store.save_session(stored())
    modes = _modes(tmp_path)
    await store.close()
    assert {"registry.db", "registry.db.lock", "registry.db-wal"} <= modes.keys()
    assert set(modes.values()) == {0o600}


def _modes(folder: Path) -> dict[str, int]:
    return {each.name: each.stat().st_mode & 0o777 for each in folder.iterdir()}
