"""What only PostgreSQL does: connections that break, a server that is away, and an owner that was changed."""

import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from kit.messages import changed
from kit.refusals import refused
from stored_values import stored

from registry_svc.mesh.store import SqlStore, StoredMesh
from weft.kernel.errors import FieldError, WeftError
from weft.kernel.reasons import Reason
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
