"""What only PostgreSQL does: connections that break, a server that is away, and an owner that was changed."""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from kit.messages import changed
from kit.refusals import refused
from stored_values import declared_model, stored

from registry_svc.mesh.store import SqlStore, StoredMesh
from weft.kernel.errors import FieldError, WeftError
from weft.kernel.reasons import Reason
from weft.sql import postgres as postgres_store
from weft_testing.postgres_server import PostgresServer

pytest_plugins = ("database_fixtures",)

WAIT_LIMIT_SECONDS = 20.0
OF_STORE = "FROM pg_stat_activity WHERE application_name = 'weft-registry-owner' AND datname = current_database()"


@pytest.fixture
async def owner(postgres_url: str) -> AsyncIterator[SqlStore]:
    """A store on PostgreSQL."""
    store = SqlStore(postgres_url)
    await store.open()
    yield store
    await store.close()


async def cut(admin: Any) -> None:
    """End the store's connections from the server's side, and wait until they are gone."""
    await admin.execute("SELECT pg_stat_clear_snapshot()")
    assert await admin.fetchval(f"SELECT count(pg_terminate_backend(pid)) {OF_STORE}") == 1
    await until(admin, f"SELECT count(*) = 0 {OF_STORE}")


async def until(admin: Any, condition: str) -> None:
    async with asyncio.timeout(WAIT_LIMIT_SECONDS):
        while not await admin.fetchval(condition):
            await asyncio.sleep(0.01)
            # Within a transaction pg_stat_activity stands still otherwise.
            await admin.execute("SELECT pg_stat_clear_snapshot()")


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


async def test_cut_connection_is_replaced_and_ownership_regained(
    owner: SqlStore, admin: Any, postgres_url: str
) -> None:
    await owner.save_session(stored("s1", "r1", ("m1",)))
    await cut(admin)
    await owner.save_session(stored("s2", "r2", ("m2",)))
    assert (await owner.load()).sessions == (stored("s1", "r1", ("m1",)), stored("s2", "r2", ("m2",)))
    with refused(Reason.ALREADY_EXISTS):
        await SqlStore(postgres_url).open()


async def test_write_cut_in_the_middle_leaves_nothing_behind(owner: SqlStore, admin: Any) -> None:
    before = stored("s1", "r1", ("m1", "m2"), ("a1",))
    await owner.save_session(before)
    after = replace(stored("s1", "r1", ("m9",), ("a9",)))
    async with admin.transaction():
        # The last statement of the write waits for this; the deletions before it are done by then.
        await admin.execute("LOCK TABLE publications IN EXCLUSIVE MODE")
        write = asyncio.create_task(owner.save_session(after))
        await until(admin, f"SELECT count(*) = 1 {OF_STORE} AND wait_event_type = 'Lock'")
        await cut(admin)
        with pytest.raises(WeftError) as failure:
            await write
    assert failure.value.reason is Reason.SERVICE_UNAVAILABLE
    assert (await owner.load()).sessions == (before,)
    await owner.save_session(after)
    assert (await owner.load()).sessions == (after,)


async def test_cancelled_write_leaves_nothing_behind(owner: SqlStore, admin: Any) -> None:
    await owner.save_session(stored())
    async with admin.transaction():
        await admin.execute("LOCK TABLE publications IN EXCLUSIVE MODE")
        write = asyncio.create_task(owner.save_session(stored(models=("m9",), agents=("a9",))))
        await until(admin, f"SELECT count(*) = 1 {OF_STORE} AND wait_event_type = 'Lock'")
        write.cancel()
        with pytest.raises(asyncio.CancelledError):
            await write
    assert (await owner.load()).sessions == (stored(),)


async def test_replaced_owner_can_no_longer_write(owner: SqlStore, admin: Any, postgres_url: str) -> None:
    await cut(admin)
    second = SqlStore(postgres_url)
    await second.open()
    await second.save_session(stored("s2", "r2"))
    with pytest.raises(WeftError, match="taken over") as while_there:
        await owner.save_session(stored("s1", "r1"))
    await second.close()
    with pytest.raises(WeftError, match="taken over") as afterwards:
        await owner.save_session(stored("s1", "r1"))
    assert while_there.value.reason is afterwards.value.reason is Reason.SERVICE_UNAVAILABLE
    # It gave the lock back each time, and opened anew it is an owner like any other.
    await owner.close()
    await owner.open()
    assert (await owner.load()).sessions == (stored("s2", "r2"),)


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


async def test_silent_server_times_out(
    owner: SqlStore, admin: Any, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await owner.close()
    monkeypatch.setattr(postgres_store, "STATEMENT_TIMEOUT_SECONDS", 0.2)
    impatient = SqlStore(postgres_url)
    await impatient.open()
    async with admin.transaction():
        await admin.execute("LOCK TABLE documents IN EXCLUSIVE MODE")
        with pytest.raises(WeftError) as failure:
            await impatient.save_documents([declared_model("m1")])
    assert failure.value.reason is Reason.SERVICE_UNAVAILABLE
    await impatient.save_documents([declared_model("m2")])
    assert (await impatient.load()).documents == (declared_model("m2"),)
    await impatient.close()


def test_error_suggests_installing_the_missing_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "weft.sql.postgres", raising=False)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(FieldError, match=r"database_url: .*pip install psycopg"):
        SqlStore("postgresql://host/weft")
