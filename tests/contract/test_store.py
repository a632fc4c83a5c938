"""One suite that every Store of the registry passes.

It lives here and not in `weft.testing.conformance`, because it speaks of the registry's own values and `weft` imports
no service.
"""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection

from registry_svc.domain import Manifest, Publication, RunnerProfile, Session, Standing
from registry_svc.store.port import Store, StoredPulse, StoredSession
from registry_svc.store.sql import SqlStore
from registry_svc.store.tables import metadata
from weft.kernel.errors import FieldError, WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation

NOW = datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)


def publication(name: str, runner: str = "r1") -> Publication:
    manifest = Manifest(
        name=name,
        pool_name="pool",
        operations=(Operation.CHAT, Operation.EMBEDDING),
        context_tokens=4096,
        digest="sha256:" + "0a" * 32,
        remote=True,
    )
    return Publication(manifest=manifest, runner=runner, created_at=NOW - timedelta(days=1))


def stored(session_id: str = "s1", runner: str = "r1", models: tuple[str, ...] = ("m1", "m2")) -> StoredSession:
    return StoredSession(
        session=Session(
            id=session_id, request_id="open-1", runner=runner, incarnation="life-1", ticket_key=bytes(range(32))
        ),
        profile=RunnerProfile(
            name=runner, incarnation="life-1", address="unix:/run/r", host="hôst", runtime="fake", version="1"
        ),
        pulse=StoredPulse(runner=runner, standing=Standing.ACTIVE, last_heartbeat_at=NOW, inactive_since=None),
        publications=tuple(publication(name, runner) for name in models),
    )


class StoreSuite:
    """What a Store must do. A subclass provides the fixture `store`: open, empty, closed afterwards."""

    async def test_an_empty_store_holds_nothing(self, store: Store) -> None:
        assert list(await store.load()) == []

    async def test_what_was_saved_comes_back_whole(self, store: Store) -> None:
        await store.save_session(stored())
        assert list(await store.load()) == [stored()]

    async def test_sessions_come_back_by_runner_and_publications_by_name(self, store: Store) -> None:
        await store.save_session(stored("s1", "zeta", ("m3", "m1")))
        await store.save_session(stored("s2", "alpha", ("m2",)))
        loaded = await store.load()
        assert [each.profile.name for each in loaded] == ["alpha", "zeta"]
        assert [each.manifest.name for each in loaded[1].publications] == ["m1", "m3"]

    async def test_saving_again_replaces_everything_of_the_session(self, store: Store) -> None:
        await store.save_session(stored(models=("m1", "m2")))
        renamed = stored(runner="r9", models=("m2", "m3"))
        await store.save_session(renamed)
        assert list(await store.load()) == [renamed]

    async def test_models_leave_whoever_held_them(self, store: Store) -> None:
        await store.save_session(stored("s1", "r1", ("m1", "m2")))
        await store.save_session(stored("s2", "r2", ("m2",)))
        assert list(await store.load()) == [stored("s1", "r1", ("m1",)), stored("s2", "r2", ("m2",))]

    async def test_an_evicted_session_ends_with_all_its_rows(self, store: Store) -> None:
        await store.save_session(stored("s1", "r1", ("m1", "m2")))
        await store.save_session(stored("s2", "r1", ("m2",)), evicted=["s1", "never-there"])
        assert list(await store.load()) == [stored("s2", "r1", ("m2",))]

    async def test_a_refused_save_leaves_everything_as_it_was(self, store: Store) -> None:
        await store.save_session(stored("s1", "r1", ("m1",)))
        await store.save_session(stored("s2", "r2", ("m2",)))
        before = list(await store.load())
        # The runner's name belongs to s1, which is not evicted: the last of several statements fails.
        with pytest.raises(WeftError) as failure:
            await store.save_session(stored("s2", "r1", ("m1", "m2")))
        assert failure.value.reason is Reason.SERVICE_UNAVAILABLE
        assert list(await store.load()) == before

    async def test_a_runner_may_publish_nothing(self, store: Store) -> None:
        await store.save_session(stored(models=()))
        assert list(await store.load()) == [stored(models=())]

    async def test_more_models_than_one_statement_takes_are_no_trouble(self, store: Store) -> None:
        names = tuple(f"m{number:05}" for number in range(2500))
        await store.save_session(stored(models=names))
        await store.save_session(stored(models=names[:2400]))
        (loaded,) = await store.load()
        assert len(loaded.publications) == 2400

    async def test_pulses_change_nothing_else(self, store: Store) -> None:
        await store.save_session(stored("s1", "r1", ("m1",)))
        await store.save_session(stored("s2", "r2", ("m2",)))
        pulse = StoredPulse(
            runner="r1", standing=Standing.CLOSED, last_heartbeat_at=NOW + timedelta(seconds=5), inactive_since=NOW
        )
        await store.save_pulses([pulse, replace(pulse, runner="never-there")])
        first, second = await store.load()
        assert first == replace(stored("s1", "r1", ("m1",)), pulse=pulse)
        assert second == stored("s2", "r2", ("m2",))

    async def test_a_pulse_may_return_to_active(self, store: Store) -> None:
        await store.save_session(stored())
        active = stored().pulse
        await store.save_pulses([replace(active, standing=Standing.SILENT, inactive_since=NOW)])
        await store.save_pulses([active])
        assert list(await store.load()) == [stored()]

    async def test_no_pulses_are_no_work(self, store: Store) -> None:
        await store.save_session(stored())
        await store.save_pulses([])
        assert list(await store.load()) == [stored()]

    async def test_deleted_sessions_take_their_rows_along(self, store: Store) -> None:
        for number in range(3):
            await store.save_session(stored(f"s{number}", f"r{number}", (f"m{number}",)))
        await store.delete_sessions(["s0", "s2", "never-there"])
        assert list(await store.load()) == [stored("s1", "r1", ("m1",))]

    async def test_times_keep_their_zone_and_their_microseconds(self, store: Store) -> None:
        await store.save_session(stored())
        (loaded,) = await store.load()
        assert loaded.pulse.last_heartbeat_at == NOW
        assert loaded.pulse.last_heartbeat_at.utcoffset() == timedelta(0)

    async def test_closing_twice_is_safe_and_a_closed_store_refuses(self, store: Store) -> None:
        await store.close()
        await store.close()
        with pytest.raises(WeftError) as failure:
            await store.load()
        assert failure.value.reason is Reason.SERVICE_UNAVAILABLE


class TestSqliteInMemory(StoreSuite):
    @pytest.fixture
    async def store(self) -> AsyncIterator[Store]:
        store = SqlStore("sqlite+aiosqlite://")
        await store.open()
        yield store
        await store.close()


class TestSqliteFile(StoreSuite):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite+aiosqlite:///{tmp_path}/per%cent/registry.db"

    @pytest.fixture
    async def store(self, url: str) -> AsyncIterator[SqlStore]:
        store = SqlStore(url)
        await store.open()
        yield store
        await store.close()

    async def test_what_was_saved_is_there_for_the_next_owner(self, store: SqlStore, url: str) -> None:
        await store.save_session(stored())
        await store.close()
        again = SqlStore(url)
        await again.open()
        assert list(await again.load()) == [stored()]
        await again.close()

    async def test_a_second_owner_is_refused_until_the_first_has_gone(self, store: SqlStore, url: str) -> None:
        second = SqlStore(url)
        with pytest.raises(WeftError) as refusal:
            await second.open()
        assert refusal.value.reason is Reason.ALREADY_EXISTS
        await second.close()
        await store.save_session(stored())
        await store.close()
        await second.open()
        await second.close()

    async def test_the_migrations_make_exactly_the_tables_the_code_expects(self, store: SqlStore) -> None:
        def differences(connection: Connection) -> list[object]:
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            return list(compare_metadata(context, metadata))

        async with store._transaction() as connection:
            assert await connection.run_sync(differences) == []

    async def test_commits_are_durable_and_foreign_keys_hold(self, store: SqlStore) -> None:
        async with store._transaction() as connection:
            settings = {
                pragma: (await connection.exec_driver_sql(f"PRAGMA {pragma}")).scalar_one()
                for pragma in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
            }
        assert settings == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 5000}

    async def test_a_migration_that_fails_leaves_no_half_made_tables(self, tmp_path: Path) -> None:
        url = f"sqlite+aiosqlite:///{tmp_path}/half.db"
        first = SqlStore(url)
        await first.open()
        async with first._transaction() as connection:
            # A leftover that the last statement of the migration runs into.
            for statement in ("DROP TABLE models", "DROP TABLE runners", "DROP TABLE sessions"):
                await connection.exec_driver_sql(statement)
            await connection.exec_driver_sql("DELETE FROM alembic_version")
            await connection.exec_driver_sql("CREATE TABLE models (name TEXT)")
        await first.close()
        with pytest.raises(WeftError):
            await first.open()
        with closing(sqlite3.connect(tmp_path / "half.db")) as raw:
            tables = {name for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert tables == {"alembic_version", "models"}

    async def test_a_failing_write_logs_no_secrets(self, store: SqlStore, capfd: pytest.CaptureFixture[str]) -> None:
        broken = replace(stored().session, id="SECRET-ID", request_id=None, ticket_key=b"SECRET-KEY")  # type: ignore[arg-type]
        with pytest.raises(WeftError):
            await store.save_session(replace(stored(), session=broken))
        out, err = capfd.readouterr()
        assert "database failed" in out + err
        assert "SECRET" not in out + err


def test_sqlite_uri_names_are_refused_rather_than_left_unlocked() -> None:
    with pytest.raises(FieldError, match="database_url"):
        SqlStore("sqlite+aiosqlite:///file:registry.db?uri=true")
