"""From the schema without what agents ask for to the one with it, on every kind of database."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, inspect
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from stored_values import BEHAVIOUR, declared_agent, stored

from registry_svc.mesh.rows import DeclaredRecords
from registry_svc.mesh.store import SqlStore
from registry_svc.store.schema import SCHEMA
from weft.api.common.v1.sampling_pb2 import SamplingParams
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.sql.schema import migrate

pytest_plugins = ("database_fixtures",)

PREVIOUS = "0002"
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
    INSERT INTO agents (name, target, targets_pool, description, system_prompt, default_params, created_at, runner)
    VALUES ('published', 'big', {yes}, 'for people', 'Be terse.', '{{"temperature":0.2}}', {seen}, 'gpu-1')
    """,
    """
    INSERT INTO declared_agents (name, target, targets_pool, description, system_prompt, default_params, created_at)
    VALUES ('declared', 'big', {yes}, '', 'Be kind.', '{{}}', {seen})
    """,
)


@pytest.fixture
async def previous(database_url: str) -> AsyncIterator[AsyncEngine]:
    """A database of the previous release, with agents in it."""
    engine = create_async_engine(database_url)
    dialect = engine.dialect.name
    if dialect == "sqlite":
        _make_folder(str(engine.url.database))
    async with engine.begin() as connection:
        await connection.run_sync(migrate, SCHEMA, PREVIOUS)
        for row in ROWS:
            text = row.format(seen=SEEN[dialect], yes=YES[dialect], key=KEY[dialect])
            await connection.exec_driver_sql(text)
    yield engine
    await engine.dispose()


def _make_folder(database: str) -> None:
    Path(database).parent.mkdir()


def _columns(connection: Connection) -> set[str]:
    return {column["name"] for column in inspect(connection).get_columns("agents")}


@pytest.mark.usefixtures("previous")
async def test_agents_of_the_previous_release_ask_for_nothing_and_keep_everything_else(database_url: str) -> None:
    store = SqlStore(database_url)
    for _ in range(2):
        await store.open()
        mesh = await store.load()
        await store.close()
        published, declared = mesh.sessions[0].agents[0].manifest, mesh.agents[0].manifest
        assert (published.HasField("behaviour"), declared.HasField("behaviour")) == (False, False)
        assert (published.name, published.pool, published.system_prompt) == ("published", "big", "Be terse.")
        assert (published.description, published.default_params) == ("for people", SamplingParams(temperature=0.2))
        assert (declared.name, declared.system_prompt) == ("declared", "Be kind.")


@pytest.mark.usefixtures("previous")
async def test_agents_of_the_previous_release_can_be_given_a_behaviour(database_url: str) -> None:
    store = SqlStore(database_url)
    await store.open()
    await store.save_declarations(DeclaredRecords([], [declared_agent("declared")]))
    await store.save_session(stored("ses-2", "gpu-1", (), ("published",)), evicted=["ses-1"])
    mesh = await store.load()
    await store.close()
    assert [each.manifest.behaviour for each in mesh.agents] == [BEHAVIOUR]
    assert [each.manifest.behaviour for each in mesh.sessions[0].agents] == [BEHAVIOUR]


async def test_a_step_that_fails_halfway_leaves_the_previous_schema(previous: AsyncEngine, database_url: str) -> None:
    async with previous.begin() as connection:
        # The second of the two columns is there already, so that the migration fails after the first.
        await connection.exec_driver_sql("ALTER TABLE declared_agents ADD COLUMN behaviour INTEGER")
    with pytest.raises(WeftError) as failure:
        await SqlStore(database_url).open()
    assert failure.value.reason is Reason.SERVICE_UNAVAILABLE
    async with previous.begin() as connection:
        assert "behaviour" not in await connection.run_sync(_columns)
        assert (await connection.exec_driver_sql("SELECT version_num FROM alembic_version")).scalar_one() == PREVIOUS
