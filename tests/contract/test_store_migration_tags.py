"""From the schema without tier, labels and owner to the one with them, on every kind of database."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, inspect
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from stored_values import TAGS, declared_agent, declared_model, stored

from registry_svc.mesh.rows import DeclaredRecords
from registry_svc.mesh.store import SqlStore
from registry_svc.store.schema import SCHEMA
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.sql.schema import migrate

pytest_plugins = ("database_fixtures",)

PREVIOUS = "0009"
TABLES = ("models", "declared_models", "agents", "declared_agents")
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
    INSERT INTO models (name, runner, pool_name, operations, context_tokens, digest, remote, skills, created_at)
    VALUES ('published', 'gpu-1', 'big', 'chat', 32768, '', {yes}, 'text', {seen})
    """,
    """
    INSERT INTO declared_models (name, runner, pool_name, operations, context_tokens, digest, remote, created_at)
    VALUES ('declared', '', '', 'chat,embedding', 0, '', {yes}, {seen})
    """,
    """
    INSERT INTO agents
    (name, runner, target, targets_pool, description, system_prompt, default_params, created_at)
    VALUES ('published-agent', 'gpu-1', 'big', {yes}, '', '', '{{}}', {seen})
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


def _tagged(connection: Connection) -> set[str]:
    """The tables that have tags."""
    inspector = inspect(connection)
    return {table for table in TABLES if "tags" in {column["name"] for column in inspector.get_columns(table)}}


@pytest.mark.usefixtures("previous")
async def test_rows_of_the_previous_release_keep_everything_and_have_no_tags(database_url: str) -> None:
    store = SqlStore(database_url)
    for _ in range(2):
        await store.open()
        mesh = await store.load()
        await store.close()
        published, declared = mesh.sessions[0].publications[0].manifest, mesh.models[0].manifest
        agents = (mesh.sessions[0].agents[0].manifest, mesh.agents[0].manifest)
        assert (published.name, published.pool_name, published.context_tokens) == ("published", "big", 32768)
        assert (declared.name, declared.remote, declared.upstream) == ("declared", True, "")
        assert [agent.name for agent in agents] == ["published-agent", "agent"]
        assert not any(each.HasField("tags") for each in (published, declared, *agents))


@pytest.mark.usefixtures("previous")
async def test_a_database_that_was_brought_up_to_date_takes_tags(database_url: str) -> None:
    store = SqlStore(database_url)
    await store.open()
    await store.save_declarations(DeclaredRecords([declared_model("declared")], [declared_agent("agent")]))
    await store.save_session(stored("ses-2", "gpu-1", ("published",), ("published-agent",)), evicted=["ses-1"])
    mesh = await store.load()
    await store.close()
    assert (mesh.models, mesh.agents) == ((declared_model("declared"),), (declared_agent("agent"),))
    assert mesh.sessions == (stored("ses-2", "gpu-1", ("published",), ("published-agent",)),)
    assert mesh.models[0].manifest.tags == mesh.sessions[0].agents[0].manifest.tags == TAGS


async def test_a_step_that_fails_halfway_leaves_the_previous_schema(previous: AsyncEngine, database_url: str) -> None:
    async with previous.begin() as connection:
        # The last of the columns is there already, so that the migration fails after everything else.
        await connection.exec_driver_sql("ALTER TABLE declared_models ADD COLUMN upstream TEXT")
    with pytest.raises(WeftError) as failure:
        await SqlStore(database_url).open()
    assert failure.value.reason is Reason.SERVICE_UNAVAILABLE
    async with previous.begin() as connection:
        assert await connection.run_sync(_tagged) == set()
        assert (await connection.exec_driver_sql("SELECT version_num FROM alembic_version")).scalar_one() == PREVIOUS
