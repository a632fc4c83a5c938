"""The store of a service's database: transactions, groups of them, failures, ownership and the end."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from kit.postgres_proxy import PostgresProxy, postgres_proxy
from kit.waiting import until

from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft.sql import postgres
from weft.sql import store as store_module
from weft.sql.address import address_of
from weft.sql.connections import DatabaseError, Tx
from weft.sql.migrations import Schema
from weft.sql.owners import OwnerRole, TakenOverError
from weft.sql.statements import insert, upsert
from weft.sql.store import Store
from weft_testing.postgres_server import PostgresServer

pytest_plugins = ("database_fixtures",)

FIRST = """
-- A table of each type of column.
CREATE TABLE things (
    id VARCHAR(16) NOT NULL,
    data BYTEA,
    made_at TIMESTAMP WITH TIME ZONE,
    is_red BOOLEAN DEFAULT false NOT NULL,
    size BIGINT,
    weight DOUBLE PRECISION,
    CONSTRAINT pk_things PRIMARY KEY (id)
);
CREATE INDEX ix_things_size ON things (size);
CREATE TABLE owners (
    id INTEGER NOT NULL PRIMARY KEY, owner VARCHAR(64) NOT NULL, address VARCHAR(512), backend_pid INTEGER,
    beat BIGINT, beat_at TIMESTAMP WITH TIME ZONE, commit_number BIGINT
);
CREATE TABLE numbers (number BIGSERIAL NOT NULL PRIMARY KEY, word TEXT NOT NULL);
"""
SECOND = "ALTER TABLE things ADD COLUMN color VARCHAR(16);\nCREATE TABLE places (id INTEGER NOT NULL PRIMARY KEY);\n"
INSERT = insert("things", "id", "size")
COUNT = "SELECT count(*) FROM things"
ROLE = OwnerRole("things", "owners", Reason.REGISTRY_STANDBY, "call the other", locks_file=True)
LIMIT_SECONDS = 30.0


def schema_of(folder: Path, *scripts: str) -> Schema:
    folder.mkdir(exist_ok=True)
    for number, script in enumerate(scripts, 18):
        (folder / f"{number:04}.sql").write_text(script)
    return Schema(owner="things", scripts=folder, version_table="things_alembic_version")


@pytest.fixture
def schema(tmp_path: Path) -> Schema:
    return schema_of(tmp_path / "scripts", FIRST)


@pytest.fixture
async def store(database_url: str, schema: Schema) -> AsyncIterator[Store]:
    store = Store(database_url, "things", schema=schema)
    await store.open()
    yield store
    await store.close()


async def ids_in(store: Store) -> list[str]:
    return await store.read(lambda tx: [name for (name,) in tx.rows("SELECT id FROM things ORDER BY id")])


async def added(store: Store, *names: str) -> None:
    await store.run(lambda tx: tx.many(INSERT, [{"id": name, "size": 1} for name in names]))


class Gate:
    """A transaction that goes on when it is told to."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.may_end = threading.Event()

    def __call__(self, tx: Tx) -> None:
        tx.execute(INSERT, id="gate", size=1)
        self.began.set()
        assert self.may_end.wait(LIMIT_SECONDS)


async def held(store: Store) -> tuple[Gate, asyncio.Task[None]]:
    """Occupies the store."""
    gate = Gate()
    holding = asyncio.create_task(store.run(gate))
    assert await asyncio.to_thread(gate.began.wait, LIMIT_SECONDS)
    return gate, holding


async def test_values_of_every_type_round_trip(store: Store) -> None:
    columns = ("id", "data", "made_at", "is_red", "size", "weight")
    moment = datetime(2026, 11, 26, 9, 0, 0, 1, tzinfo=timezone(timedelta(hours=2)))
    values = ("a", b"\x00\xff", moment, True, 2**40, 0.5)
    row = await store.run(
        lambda tx: tx.row(f"{insert('things', *columns)} RETURNING *", **dict(zip(columns, values, strict=True)))
    )
    assert tuple(row) == values
    assert row.made_at.utcoffset() == timedelta(0)
    assert (row.is_red, row.made_at) == (True, moment)
    await store.run(lambda tx: tx.execute(INSERT, id="b", size=None))
    found = await store.read(
        lambda tx: tx.row("SELECT * FROM things WHERE NOT is_red AND id LIKE '%b' AND size IS NULL")
    )
    assert tuple(found) == ("b", None, None, False, None, None)
    later = {"moment": datetime(2026, 11, 26, 7, 0, 0, tzinfo=UTC)}
    assert await store.read(lambda tx: tx.value(f"{COUNT} WHERE made_at > :moment", **later)) == 1
    assert await store.read(lambda tx: tx.value("SELECT sum(size) FROM things")) == 2**40


async def test_list_parameters_upserts_and_row_counts_work(store: Store) -> None:
    await added(store, "a", "b", "c")
    await store.run(lambda tx: tx.many(INSERT, []))

    def work(tx: Tx) -> tuple[Any, ...]:
        tx.execute(upsert("things", "id", "size"), id="b", size=7)
        within = tx.rows("SELECT id, size FROM things WHERE id IN :ids ORDER BY id", ids=["b", "c", "x"])
        without = tx.value(f"{COUNT} WHERE id NOT IN :ids", ids=("a",))
        none = tx.value(f"{COUNT} WHERE size IN :sizes", sizes=[])
        first, second = (tx.value(f"{insert('numbers', 'word')} RETURNING number", word="w") for _ in range(2))
        return [tuple(each) for each in within], without, none, second - first

    assert await store.run(work) == ([("b", 7), ("c", 1)], 2, 0, 1)
    assert await store.run(lambda tx: tx.execute("DELETE FROM things WHERE size = :size", size=1)) == 2
    assert await store.read(lambda tx: tx.row("SELECT id FROM things WHERE id = 'x'")) is None


async def test_waiting_writes_are_committed_together_and_fail_independently(store: Store) -> None:
    gate, holding = await held(store)

    def refused(tx: Tx) -> None:
        tx.execute(INSERT, id="refused", size=1)
        raise WeftError(Reason.NOT_FOUND, "nothing of this name")

    works = [
        store.run(lambda tx: tx.execute(INSERT, id="a", size=1)),
        store.run(refused),
        store.run(lambda tx: tx.execute(INSERT, id="a", size=1)),
        store.run(lambda tx: tx.execute(INSERT, id="b", size=1)),
    ]
    waiting = asyncio.gather(*works, return_exceptions=True)
    await asyncio.sleep(0)
    gate.may_end.set()
    await holding
    first, second, third, fourth = await waiting
    assert (first, fourth) == (1, 1)
    assert isinstance(second, WeftError)
    assert isinstance(third, WeftError)
    assert (second.reason, third.reason) == (Reason.NOT_FOUND, Reason.SERVICE_UNAVAILABLE)
    assert await ids_in(store) == ["a", "b", "gate"]


async def test_cancelled_caller_leaves_nothing_behind_and_affects_no_other(store: Store) -> None:
    gate, holding = await held(store)
    unbegun = asyncio.create_task(added(store, "unbegun"))
    other = asyncio.create_task(added(store, "other"))
    await asyncio.sleep(0)
    for task in (holding, unbegun):
        task.cancel()
    gate.may_end.set()
    assert [type(each) for each in await asyncio.gather(holding, unbegun, return_exceptions=True)] == [
        asyncio.CancelledError
    ] * 2
    await other
    assert await ids_in(store) == ["other"]


async def test_too_many_waiting_writes_are_rejected_except_vital_ones(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_WAITING_ORDINARY", 1)
    gate, holding = await held(store)
    waiting = asyncio.create_task(added(store, "a"))
    await asyncio.sleep(0)
    with pytest.raises(WeftError, match="too many writes wait for the things's database") as refused:
        await added(store, "b")
    vital = asyncio.create_task(store.run(lambda tx: tx.execute(INSERT, id="v", size=1), vital=True))
    await asyncio.sleep(0)
    gate.may_end.set()
    await asyncio.gather(holding, waiting, vital)
    assert refused.value.reason is Reason.SERVICE_UNAVAILABLE
    assert await ids_in(store) == ["a", "gate", "v"]


async def test_close_finishes_pending_writes_and_rejects_new_ones(store: Store, database_url: str) -> None:
    gate, holding = await held(store)
    waiting = asyncio.create_task(added(store, "a"))
    await asyncio.sleep(0)
    closing_it = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    with pytest.raises(WeftError, match="is not open"):
        await added(store, "late")
    gate.may_end.set()
    await asyncio.gather(holding, waiting, closing_it)
    await store.close()
    again = Store(database_url, "things")
    await again.open()
    assert await ids_in(again) == ["a", "gate"]
    await again.close()


async def test_close_times_out(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "CLOSE_WAIT_SECONDS", 0.5)
    forever = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    endless = asyncio.create_task(store.run(lambda tx: (tx.execute(INSERT, id="a", size=1), tx.value(forever))))
    await asyncio.sleep(0.1)
    waiting = asyncio.create_task(added(store, "b"))
    await asyncio.sleep(0)
    async with asyncio.timeout(LIMIT_SECONDS):
        await store.close()
        outcomes = await asyncio.gather(endless, waiting, return_exceptions=True)
    assert [each.reason for each in outcomes if isinstance(each, WeftError)] == [Reason.SERVICE_UNAVAILABLE] * 2
    await store.open()
    assert await ids_in(store) == []


async def test_failed_statement_aborts_its_transaction_and_error_hides_values(
    store: Store, capfd: pytest.CaptureFixture[str]
) -> None:
    await added(store, "SECRET")
    with pytest.raises(
        WeftError, match=r"the things's database failed: it cannot be used \(.*\); its log has details"
    ) as failed:
        await store.run(lambda tx: (tx.execute(INSERT, id="a", size=1), tx.execute(INSERT, id="SECRET", size=2)))
    with pytest.raises(DatabaseError) as plain:
        await store.attempt(lambda tx: tx.execute(INSERT, id="SECRET", size=2))
    assert failed.value.__cause__ is None
    assert plain.value.code in {"SQLITE_CONSTRAINT_PRIMARYKEY", "23505"}
    out, err = capfd.readouterr()
    assert "SECRET" not in out + err + str(plain.value)
    assert await ids_in(store) == ["SECRET"]


async def test_transaction_with_a_caught_error_is_not_committed(store: Store) -> None:
    def work(tx: Tx) -> None:
        tx.execute(INSERT, id="a", size=1)
        with pytest.raises(DatabaseError):
            tx.execute(INSERT, id="a", size=1)

    # SQLite undoes the failed statement alone, PostgreSQL the transaction.
    (outcome,) = await asyncio.gather(store.run(work), return_exceptions=True)
    assert await ids_in(store) == (["a"] if outcome is None else [])


async def test_health_check_writes_nothing(store: Store) -> None:
    assert await store.write_failure() == ""
    assert (await store.schema()).database_revision == store.known_schema.known_revision == "0018"
    await store.close()
    assert await store.write_failure() == "not open"
    assert (await store.schema()).database_revision == ""


async def test_older_database_is_migrated_and_keeps_its_rows(store: Store, database_url: str, tmp_path: Path) -> None:
    await added(store, "lamp")
    await store.close()
    for _ in range(2):
        newer = Store(database_url, "things", schema=schema_of(tmp_path / "newer", FIRST, SECOND))
        await newer.open()
        assert tuple(await newer.read(lambda tx: tx.row("SELECT id, color FROM things"))) == ("lamp", None)
        assert (await newer.schema()).database_revision == "0019"
        await newer.close()


async def test_failed_migration_leaves_the_older_database_unchanged(
    store: Store, database_url: str, tmp_path: Path
) -> None:
    await store.run(lambda tx: tx.execute("CREATE TABLE places (id INTEGER)"))
    newer = Store(database_url, "things", schema=schema_of(tmp_path / "newer", FIRST, SECOND))
    with pytest.raises(WeftError):
        await newer.open()
    await store.close()
    await store.open()
    assert (await store.schema()).database_revision == "0018"


@pytest.mark.parametrize("revision", ["9999", "0001"])
async def test_database_of_an_unknown_revision_is_rejected(store: Store, database_url: str, revision: str) -> None:
    await store.run(lambda tx: tx.execute("UPDATE things_alembic_version SET version_num = :it", it=revision))
    await store.close()
    with pytest.raises(WeftError, match=f"things's database .*: it has the schema {revision}, which weft .* not know"):
        await store.open()
    bare = Store(database_url, "things")
    await bare.open()
    assert await bare.read(lambda tx: tx.value("SELECT version_num FROM things_alembic_version")) == revision
    await bare.close()


async def test_file_of_a_shared_role_opens_twice_and_a_dump_has_it_alone(tmp_path: Path, schema: Schema) -> None:
    """A router replaces a frozen one, which still holds the file; nothing may write during a dump."""
    path, shared = tmp_path / "things.db", replace(ROLE, shares_file=True)
    first, second, alone = (Store(path, "things", schema=schema, role=role) for role in (shared, shared, ROLE))
    await first.open()
    await second.open()
    for users in (second, first):
        with pytest.raises(WeftError, match="another things runs on this database"):
            await alone.open()
        await users.close()
    await alone.open()
    with pytest.raises(WeftError, match="another things runs on this database"):
        await first.open()
    await alone.close()


async def test_role_is_exclusive_to_one_process_until_it_closes(database_url: str, schema: Schema) -> None:
    first, second = (Store(database_url, "things", schema=schema, role=ROLE, address="10.0.0.1:7070") for _ in range(2))
    await first.open()
    with pytest.raises(WeftError, match="another things runs on this database") as refused:
        await second.open()
    assert refused.value.reason is Reason.ALREADY_EXISTS
    assert await first.beat() is False
    await first.close()
    await second.open()
    await added(second, "a")
    await second.close()


async def test_commits_are_counted_in_the_transaction_and_durable_before_acknowledgement(
    database_url: str, schema: Schema
) -> None:
    seen: list[str] = []

    class Counter:
        def require_queue_room(self) -> None:
            seen.append("place")

        def count(self, tx: Tx) -> None:
            seen.append("count")
            tx.execute(INSERT, id=f"count{len(seen)}", size=1)

        def keep(self) -> None:
            seen.append("keep")
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "not kept")

    store = Store(database_url, "things", schema=schema, counter=Counter())
    await store.open()
    await store.run(lambda tx: tx.value(COUNT))
    await store.write_failure()
    assert seen == ["place", "place"]
    if store.address.is_sqlite:
        with pytest.raises(WeftError, match="not kept"):
            await added(store, "a")
        assert seen[2:] == ["place", "count", "keep"]
        assert len(await ids_in(store)) == 2
    await store.close()


async def test_sqlite_reads_wait_for_no_writer_and_a_locked_file_is_reported(
    tmp_path: Path, schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.sql.connections.BUSY_TIMEOUT_MS", 100)
    store = Store(tmp_path / "own.db", "things", schema=schema)
    await store.open()
    await added(store, "a")
    with closing(sqlite3.connect(tmp_path / "own.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert await ids_in(store) == ["a"]
        with pytest.raises(DatabaseError) as busy:
            await store.attempt(lambda tx: tx.execute(INSERT, id="b", size=1))
        with pytest.raises(WeftError, match="failed: it is locked by another program"):
            await added(store, "b")
    assert busy.value.code == "SQLITE_BUSY"
    await added(store, "c")
    await store.close()


def content_of(folder: Path) -> bytes:
    return b"".join(each.read_bytes() for each in folder.iterdir() if each.is_file())


async def test_sqlite_store_opens_while_its_file_is_locked(tmp_path: Path, schema: Schema) -> None:
    store = Store(tmp_path / "own.db", "things", schema=schema)
    await store.open()
    await store.close()
    with closing(sqlite3.connect(tmp_path / "own.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        await store.open()
        assert await ids_in(store) == []
    await store.close()


async def test_deleted_rows_are_not_left_in_the_file(tmp_path: Path, schema: Schema) -> None:
    store, secret = Store(tmp_path / "own.db", "things", schema=schema), b"the-words-of-ann" * 1000
    await store.open()
    await store.run(lambda tx: tx.execute(insert("things", "id", "data"), id="a", data=secret))
    await store.run(lambda tx: tx.execute("DELETE FROM things"))
    await store.close()
    assert secret[:16] not in content_of(tmp_path)


async def test_broken_connection_is_replaced_unless_another_owner_took_over(postgres_url: str, schema: Schema) -> None:
    first = Store(postgres_url, "things", schema=schema, role=ROLE, address="10.0.0.1:7070")
    admin = Store(postgres_url, "admin")
    await first.open()
    await admin.open()
    cut = "SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity WHERE application_name = :name"
    assert await admin.run(lambda tx: tx.value(cut, name=ROLE.owner_application)) == 1
    await added(first, "a")
    gate, holding = await held(first)
    await admin.run(lambda tx: tx.value(cut, name=ROLE.owner_application))
    gate.may_end.set()
    with pytest.raises(WeftError):
        await holding
    assert await first.beat() is False
    await admin.run(lambda tx: tx.execute("UPDATE owners SET owner = 'other'"))
    await admin.run(lambda tx: tx.value(cut, name=ROLE.owner_application))
    for _ in range(2):
        with pytest.raises(TakenOverError, match="another things has taken over"):
            await added(first, "b")
    assert await ids_in(admin) == ["a"]
    await admin.close()
    await first.close()


@pytest.fixture
async def proxy(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PostgresProxy]:
    """In front of the server."""
    async with postgres_proxy(tmp_path_factory.mktemp("pg"), postgres.socket_folder) as proxy:
        yield proxy


@pytest.fixture
async def owner(proxy: PostgresProxy, postgres_database: str, schema: Schema) -> AsyncIterator[Store]:
    """A store whose connection can be cut."""
    store = Store(proxy.url(postgres_database), "things", schema=schema, role=ROLE)
    await store.open()
    yield store
    await store.close()


async def test_commit_whose_acknowledgement_was_lost_is_known_before_its_callers_are_answered(
    proxy: PostgresProxy, owner: Store
) -> None:
    """The callers were told that it failed, and the registry showed a stored key only after a restart."""
    await added(owner, "a")
    proxy.cut = "after"
    await asyncio.gather(added(owner, "b"), added(owner, "c"))
    proxy.cut = "before"
    with pytest.raises(WeftError, match="the things's database failed"):
        await added(owner, "d")
    assert (proxy.cuts, owner.is_in_doubt) == (2, False)
    assert await ids_in(owner) == ["a", "b", "c"]


async def test_commit_in_doubt_waits_for_the_server_and_others_fail_meanwhile(
    proxy: PostgresProxy, owner: Store
) -> None:
    target, proxy.target, proxy.cut = proxy.target, None, "after"
    doubtful = asyncio.create_task(added(owner, "a"))
    await until(lambda: owner.is_in_doubt)
    with pytest.raises(WeftError, match="the things's database failed"):
        await ids_in(owner)
    assert not doubtful.done()
    proxy.target = target
    await doubtful
    assert await ids_in(owner) == ["a"]


async def test_commit_in_doubt_is_told_as_such_if_its_process_ends(proxy: PostgresProxy, owner: Store) -> None:
    proxy.target, proxy.cut = None, "after"
    doubtful = asyncio.create_task(added(owner, "a"))
    await until(lambda: owner.is_in_doubt)
    await owner.close()
    with pytest.raises(WeftError, match="the things ends before its database told whether this was stored"):
        await doubtful


async def test_owner_that_was_replaced_while_its_commit_was_in_doubt_ends(
    proxy: PostgresProxy, owner: Store, postgres_url: str
) -> None:
    target, proxy.target, proxy.cut = proxy.target, None, "after"
    doubtful = asyncio.create_task(added(owner, "a"))
    await until(lambda: owner.is_in_doubt)
    admin = Store(postgres_url, "admin")
    await admin.open()
    await admin.run(lambda tx: tx.execute("UPDATE owners SET owner = 'other'"))
    await admin.close()
    proxy.target = target
    with pytest.raises(TakenOverError, match="another things has taken over"):
        await doubtful


async def test_transaction_that_changes_nothing_and_heartbeat_that_a_crash_may_lose_are_not_numbered(
    owner: Store,
) -> None:
    """A lost heartbeat was logged as "the database lacks changes that it had acknowledged"."""
    number = "SELECT commit_number FROM owners"
    await added(owner, "a")
    before = await owner.read(lambda tx: tx.value(number))
    assert await owner.run(lambda tx: tx.value(COUNT)) == 1
    await owner.beat()
    assert await owner.read(lambda tx: tx.value(number)) == before > 0


async def test_connection_to_a_server_that_became_read_only_is_replaced(owner: Store) -> None:
    """The mesh stayed on the old primary, which could not write any more, until it was restarted."""
    await added(owner, "a")
    await owner.attempt(lambda tx: tx.execute("SET default_transaction_read_only = on"), writes=False)
    with pytest.raises(WeftError, match=r"is read-only \(25006\); check that its address leads to the primary"):
        await added(owner, "b")
    await added(owner, "c")
    assert await ids_in(owner) == ["a", "c"]


async def test_slow_statement_and_silent_server_time_out(
    postgres_url: str, schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "STATEMENT_TIMEOUT_SECONDS", 0.2)
    store = Store(postgres_url, "things", schema=schema)
    await store.open()
    with pytest.raises(DatabaseError) as ended:
        await store.attempt(lambda tx: tx.value("SELECT pg_sleep(5)"))
    assert ended.value.code == "57014"
    monkeypatch.setattr(postgres, "SILENCE_SECONDS", 0.0)
    await store.attempt(lambda tx: tx.execute("SET statement_timeout = 0"))
    with pytest.raises(DatabaseError) as silent:
        await store.attempt(lambda tx: tx.value("SELECT pg_sleep(5)"))
    assert silent.value.code == "_WaitTimeout"
    await added(store, "a")
    assert await ids_in(store) == ["a"]
    await store.close()


def test_urls_are_shown_without_passwords() -> None:
    address = address_of("postgresql+asyncpg://weft:SECRET@db.example:5433/mesh?ssl=require")
    assert address.url == "postgresql://weft:SECRET@db.example:5433/mesh?sslmode=require"
    assert (address.location, address.shown) == ("db.example/mesh", "postgresql://weft:***@db.example:5433/mesh")
    assert "SECRET" not in repr(address)
    several = address_of("postgresql://weft:SECRET@a.example:5433,[::1]/mesh")
    assert (several.location, several.shown) == (
        "a.example,[::1]/mesh",
        "postgresql://weft:***@a.example:5433,[::1]/mesh",
    )
    assert address_of("sqlite:////var/lib/weft.db").path == Path("/var/lib/weft.db")
    assert address_of("sqlite+aiosqlite:///per%cent.db").path == Path("per%cent.db")
    assert address_of("sqlite://").is_sqlite
    for wrong in (
        "",
        "weft.db",
        "mysql://root:SECRET@host/weft",
        "postgresql://weft:SECRET@host:port/weft",
        "sqlite://a",
        "sqlite:///file:registry.db?uri=true",
    ):
        with pytest.raises(FieldError, match="database_url") as refused:
            address_of(wrong)
        assert "SECRET" not in str(refused.value)
        assert refused.value.__cause__ is None
