"""From the schema without API keys to the one with them, on every kind of database."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import Connection, inspect
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from stored_values import mesh_settings

from registry_svc.keys.key_store import ApiKey, SqlKeyStore, StoredKeys
from registry_svc.mesh.store import SqlStore
from registry_svc.store.schema import SCHEMA
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.sql.schema import migrate

pytest_plugins = ("database_fixtures",)

PREVIOUS = "0006"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = ApiKey(id="k", description="", tenant="t", scopes=("models:view",), digest=b"d" * 32, created_at=NOW)
YES = {"sqlite": "1", "postgresql": "true"}


@pytest.fixture
async def previous(database_url: str) -> AsyncIterator[AsyncEngine]:
    """A database of the previous release, with something in it."""
    engine = create_async_engine(database_url)
    if engine.dialect.name == "sqlite":
        _make_folder(str(engine.url.database))
    async with engine.begin() as connection:
        await connection.run_sync(migrate, SCHEMA, PREVIOUS)
        settings = mesh_settings()
        allowed = YES[engine.dialect.name] if settings.allow_cloud_fallback else f"NOT {YES[engine.dialect.name]}"
        await connection.exec_driver_sql(
            f"INSERT INTO mesh_settings (id, allow_cloud_fallback, revision) VALUES (1, {allowed}, {settings.revision})"
        )
    yield engine
    await engine.dispose()


def _make_folder(database: str) -> None:
    Path(database).parent.mkdir()


def _key_tables(connection: Connection) -> set[str]:
    return set(inspect(connection).get_table_names()) & {"api_keys", "key_pepper"}


@pytest.mark.usefixtures("previous")
async def test_a_database_of_the_previous_release_keeps_what_it_has_and_takes_keys(database_url: str) -> None:
    store = SqlStore(database_url)
    await store.open()
    settings = mesh_settings()
    settings.ClearField("journal")  # a setting of a later release
    assert (await store.load()).settings == settings
    keys = SqlKeyStore(store)
    assert await keys.load() == StoredKeys()
    await keys.save([KEY])
    await keys.save_pepper_mark(b"m" * 32)
    await store.close()
    await store.open()
    assert await keys.load() == StoredKeys(keys=(KEY,), pepper_mark=b"m" * 32)
    await store.close()


async def test_a_step_that_fails_halfway_leaves_the_previous_schema(previous: AsyncEngine, database_url: str) -> None:
    async with previous.begin() as connection:
        # The last of the tables is there already, so that the migration fails after everything else.
        await connection.exec_driver_sql("CREATE TABLE key_pepper (id INTEGER)")
    with pytest.raises(WeftError) as failure:
        await SqlStore(database_url).open()
    assert failure.value.reason is Reason.SERVICE_UNAVAILABLE
    async with previous.begin() as connection:
        assert await connection.run_sync(_key_tables) == {"key_pepper"}
        assert (await connection.exec_driver_sql("SELECT version_num FROM alembic_version")).scalar_one() == PREVIOUS
