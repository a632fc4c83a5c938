"""What only PostgreSQL does: connections that break, a server that is away, and an owner that was changed."""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit.messages import changed
from kit.refusals import refused
from stored_values import declared_model, stored

from registry_svc.mesh.store import SqlStore, StoredMesh
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.postgres_server import PostgresServer

pytest_plugins = ("database_fixtures",)

OF_STORE = "FROM pg_stat_activity WHERE application_name = 'weft-registry-owner' AND datname = current_database()"


@pytest.fixture
async def owner(postgres_url: str) -> AsyncIterator[SqlStore]:
    """A store on PostgreSQL."""
    store = SqlStore(postgres_url)
    await store.open()
    yield store
    await store.close()


async def test_text_in_an_sql_ascii_database_is_decoded(postgres: PostgresServer) -> None:
    postgres.sql("CREATE DATABASE ascii ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    store = SqlStore(postgres.url("ascii"))
    await store.open()
    try:
        assert await store.run(lambda tx: tx.value("SELECT 'Jürgen'::text")) == "Jürgen"
    finally:
        await store.close()
        postgres.sql("DROP DATABASE ascii")


async def test_one_connection_holds_the_lock_with_synchronous_commit(owner: SqlStore, admin: Any) -> None:
    assert await admin.fetchval(f"SELECT count(*) {OF_STORE}") == 1
    held = "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE l.locktype = 'advisory'"
    assert await admin.fetchval(
        f"{held} AND a.application_name = 'weft-registry-owner' AND a.datname = current_database()"
    )
    assert await owner.run(lambda tx: tx.value("SHOW synchronous_commit")) == "on"
    # The server's default is another, so it was the store that asked for it.
    assert await admin.fetchval("SHOW synchronous_commit") == "off"


async def test_two_databases_on_one_server_have_separate_owners(owner: SqlStore, postgres: PostgresServer) -> None:
    with postgres.fresh_database() as other:
        second = SqlStore(postgres.url(other))
        await second.open()
        await second.save_session(stored())
        await second.close()
    assert await owner.load() == StoredMesh()


async def test_text_postgres_cannot_store_rejects_the_whole_write(owner: SqlStore) -> None:
    await owner.save_session(stored())
    broken = replace(stored(), profile=changed(stored().profile, host="SECRET\x00"))
    with refused(Reason.SERVICE_UNAVAILABLE):
        await owner.save_session(broken)
    assert (await owner.load()).sessions == (stored(),)


@pytest.mark.parametrize("place", ["/weft?host=/nowhere", "127.0.0.1:9/weft", "/no-such-database?host={socket}"])
async def test_login_failure_is_a_clear_error_without_the_password(
    place: str, postgres: PostgresServer, capfd: pytest.CaptureFixture[str]
) -> None:
    where = place.format(socket=postgres.socket_folder)
    store = SqlStore(f"postgresql://postgres:SECRET@{where}")
    with pytest.raises(WeftError) as failure:
        await store.open()
    await store.close()
    assert failure.value.reason is Reason.SERVICE_UNAVAILABLE
    out, err = capfd.readouterr()
    assert "postgresql://postgres:***@" in out + err
    assert "SECRET" not in out + err + str(failure.value)
    assert "check that it is running and accepts connections" in failure.value.message


async def test_failed_open_leaves_no_lock_behind(owner: SqlStore, admin: Any, postgres_url: str) -> None:
    await owner.close()
    newest = await admin.fetchval("SELECT version_num FROM alembic_version")
    await admin.execute("UPDATE alembic_version SET version_num = '9999'")
    store = SqlStore(postgres_url)
    with refused(Reason.SERVICE_UNAVAILABLE):
        await store.open()
    await admin.execute("UPDATE alembic_version SET version_num = %s", newest)
    await store.open()
    await store.close()


def test_error_suggests_installing_the_missing_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "weft.sql.postgres", raising=False)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(FieldError, match=r"database_url: .*pip install psycopg"):
        SqlStore("postgresql://host/weft")


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
