"""From the schema without routes, settings and skills to the one with them, on every kind of database."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, inspect
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from stored_values import declared_model, declared_route, mesh_settings, stored

from registry_svc.mesh.rows import DeclaredRecords
from registry_svc.mesh.store import SqlStore
from registry_svc.store.schema import SCHEMA
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.sql.schema import migrate

pytest_plugins = ("database_fixtures",)

PREVIOUS = "0005"
SEEN = {"sqlite": "'2026-01-01 12:00:00.123456'", "postgresql": "'2026-01-01 12:00:00.123456+00'"}
YES = {"sqlite": "1", "postgresql": "true"}
KEY = {"sqlite": "x'00ff10'", "postgresql": "'\\x00ff10'::bytea"}
ROWS = (
    "INSERT INTO sessions (id, request_id, ticket_key) VALUES ('ses-1', 'open-1', {key})",
    """
    INSERT INTO runners (name, session_id, incarnation, address, host, runtime, version, standing, last_heartbeat_at)
    VALUES ('gpu-1', 'ses-1', 'life-1', 'a:1', 'h', 'llama', '1', 'active', {seen})
    """,
    """
    INSERT INTO models (name, runner, pool_name, operations, context_tokens, digest, remote, created_at)
    VALUES ('published', 'gpu-1', 'big', 'chat', 32768, '', {yes}, {seen})
    """,
    """
    INSERT INTO declared_models (name, runner, pool_name, operations, context_tokens, digest, remote, created_at)
    VALUES ('declared', '', '', 'chat,embedding', 0, '', {yes}, {seen})
    """,
    """
    INSERT INTO declared_agents (name, target, targets_pool, description, system_prompt, default_params, created_at)
    VALUES ('agent', 'big', {yes}, '', 'Be kind.', '{{}}', {seen})
    """,
)


@pytest.fixture
async def previous(database_url: str) -> AsyncIterator[AsyncEngine]:
    """A database of the previous release, with rows in it."""
    engine = create_async_engine(database_url)
    dialect = engine.dialect.name
    if dialect == "sqlite":
        _make_folder(str(engine.url.database))
    async with engine.begin() as connection:
        await connection.run_sync(migrate, SCHEMA, PREVIOUS)
        for row in ROWS:
            await connection.exec_driver_sql(row.format(seen=SEEN[dialect], yes=YES[dialect], key=KEY[dialect]))
    yield engine
    await engine.dispose()


def _make_folder(database: str) -> None:
    Path(database).parent.mkdir()


def _shape(connection: Connection) -> tuple[bool, set[str]]:
    """Whether models have skills, and the tables of this step that there are."""
    tables = set(inspect(connection).get_table_names())
    columns = {column["name"] for column in inspect(connection).get_columns("models")}
    return "skills" in columns, tables & {"declared_routes", "mesh_settings"}


@pytest.mark.usefixtures("previous")
async def test_rows_of_the_previous_release_keep_everything_and_know_no_skills(database_url: str) -> None:
    store = SqlStore(database_url)
    for _ in range(2):
        await store.open()
        mesh = await store.load()
        await store.close()
        published, declared = mesh.sessions[0].publications[0].manifest, mesh.models[0].manifest
        assert (published.name, published.pool_name, published.context_tokens) == ("published", "big", 32768)
        assert (declared.name, declared.remote) == ("declared", True)
        assert (list(published.skills), list(declared.skills)) == ([], [])
        assert mesh.agents[0].manifest.system_prompt == "Be kind."
        # No settings: the registry begins with those of its configuration.
        assert (mesh.routes, mesh.settings) == ((), None)


@pytest.mark.usefixtures("previous")
async def test_a_database_that_was_brought_up_to_date_takes_routes_settings_and_skills(database_url: str) -> None:
    store = SqlStore(database_url)
    await store.open()
    await store.save_declarations(DeclaredRecords([declared_model("declared")], [], [declared_route("q1")]))
    await store.save_session(stored("ses-2", "gpu-1", ("published",)), evicted=["ses-1"])
    await store.save_settings(mesh_settings())
    mesh = await store.load()
    await store.close()
    assert mesh.models == (declared_model("declared"),)
    assert mesh.sessions == (stored("ses-2", "gpu-1", ("published",)),)
    assert (mesh.routes, mesh.settings) == ((declared_route("q1"),), mesh_settings())


async def test_a_step_that_fails_halfway_leaves_the_previous_schema(previous: AsyncEngine, database_url: str) -> None:
    async with previous.begin() as connection:
        # The last of the tables is there already, so that the migration fails after everything else.
        await connection.exec_driver_sql("CREATE TABLE mesh_settings (id INTEGER)")
    with pytest.raises(WeftError) as failure:
        await SqlStore(database_url).open()
    assert failure.value.reason is Reason.SERVICE_UNAVAILABLE
    async with previous.begin() as connection:
        assert await connection.run_sync(_shape) == (False, {"mesh_settings"})
        assert (await connection.exec_driver_sql("SELECT version_num FROM alembic_version")).scalar_one() == PREVIOUS
