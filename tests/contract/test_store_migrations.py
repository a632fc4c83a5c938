"""From the schema of the previous release to this one's, on every kind of database."""

from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, inspect
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from stored_values import agent, stored

from registry_svc.mesh.domain import Session, Standing
from registry_svc.mesh.rows import StoredMesh, StoredPulse, StoredSession
from registry_svc.mesh.store import SqlStore
from registry_svc.store.schema import SCHEMA, metadata
from weft.api.registry.v1 import model_pb2, runner_pb2
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.timestamps import stamp_of
from weft.sql.schema import migrate

pytest_plugins = ("database_fixtures",)

PREVIOUS = "0001"
# As the previous release wrote it, on each database in the form in which that release's driver did.
LITERALS = {
    "sqlite": {
        "key": "x'00ff10'",
        "seen": "'2026-01-01 12:00:00.123456'",
        "lost": "'2026-01-01 12:01:30.000000'",
        "yes": "1",
        "no": "0",
    },
    "postgresql": {
        "key": "'\\x00ff10'::bytea",
        "seen": "'2026-01-01 12:00:00.123456+00'",
        "lost": "'2026-01-01 13:01:30.000000+01'",
        "yes": "true",
        "no": "false",
    },
}
ROWS = (
    "INSERT INTO sessions (id, request_id, ticket_key) VALUES ('ses-1', 'open-1', {key}), ('ses-2', 'open-2', {key})",
    """
    INSERT INTO runners (name, session_id, incarnation, address, host, runtime, version, standing, last_heartbeat_at,
        inactive_since)
    VALUES ('gpu-1', 'ses-1', 'life-1', '10.0.0.1:7000', 'hôst', 'llama', '1.2', 'active', {seen}, NULL),
        ('gpu-2', 'ses-2', 'life-2', 'unix:/run/r', 'h', 'fake', '', 'silent', {seen}, {lost})
    """,
    """
    INSERT INTO models (name, runner, pool_name, operations, context_tokens, digest, remote, created_at)
    VALUES ('qwen', 'gpu-1', 'big', 'chat,completion', 32768, 'sha256:aa', {no}, {seen}),
        ('embedder', 'gpu-1', '', 'embedding', 0, '', {yes}, {seen})
    """,
)
SEEN = datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)
LOST = datetime(2026, 1, 1, 12, 1, 30, tzinfo=UTC)


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    """The same database, past the store."""
    engine = create_async_engine(database_url)
    if engine.dialect.name == "sqlite":
        _make_folder(str(engine.url.database))
    yield engine
    await engine.dispose()


def _make_folder(database: str) -> None:
    Path(database).parent.mkdir()


@pytest.fixture
async def previous(engine: AsyncEngine) -> AsyncEngine:
    """A database of the previous release, with rows in it."""
    async with engine.begin() as connection:
        await connection.run_sync(migrate, SCHEMA, PREVIOUS)
        assert await connection.run_sync(_tables) == {"alembic_version", "sessions", "runners", "models"}
        for row in ROWS:
            await connection.exec_driver_sql(row.format(**LITERALS[engine.dialect.name]))
    return engine


def _tables(connection: Connection) -> set[str]:
    return set(inspect(connection).get_table_names())


def _differences(connection: Connection) -> Sequence[object]:
    options = {"compare_type": True, "compare_server_default": True}
    return list(compare_metadata(MigrationContext.configure(connection, opts=options), metadata))


def _model(
    name: str, pool_name: str, operations: list["model_pb2.ModelOperation.ValueType"], *, large: bool
) -> model_pb2.Model:
    manifest = model_pb2.ModelManifest(
        name=name,
        pool_name=pool_name,
        operations=operations,
        context_tokens=32768 if large else 0,
        digest="sha256:aa" if large else "",
        remote=not large,
    )
    kind = model_pb2.Model.KIND_VIRTUAL
    return model_pb2.Model(manifest=manifest, kind=kind, runner="gpu-1", create_time=stamp_of(SEEN))


EXPECTED = StoredMesh(
    sessions=(
        StoredSession(
            session=Session(
                id="ses-1", request_id="open-1", runner="gpu-1", incarnation="life-1", ticket_key=b"\x00\xff\x10"
            ),
            profile=runner_pb2.Runner(
                name="gpu-1",
                incarnation="life-1",
                address="10.0.0.1:7000",
                host="hôst",
                runtime="llama",
                version="1.2",
                dial_out=False,
            ),
            pulse=StoredPulse(runner="gpu-1", standing=Standing.ACTIVE, last_heartbeat_at=SEEN, inactive_since=None),
            publications=(
                _model("embedder", "", [model_pb2.MODEL_OPERATION_EMBEDDING], large=False),
                _model(
                    "qwen", "big", [model_pb2.MODEL_OPERATION_CHAT, model_pb2.MODEL_OPERATION_COMPLETION], large=True
                ),
            ),
        ),
        StoredSession(
            session=Session(
                id="ses-2", request_id="open-2", runner="gpu-2", incarnation="life-2", ticket_key=b"\x00\xff\x10"
            ),
            profile=runner_pb2.Runner(
                name="gpu-2",
                incarnation="life-2",
                address="unix:/run/r",
                host="h",
                runtime="fake",
                version="",
                dial_out=False,
            ),
            pulse=StoredPulse(runner="gpu-2", standing=Standing.SILENT, last_heartbeat_at=SEEN, inactive_since=LOST),
            publications=(),
        ),
    )
)


@pytest.mark.usefixtures("previous")
async def test_rows_of_the_previous_release_are_all_there(database_url: str) -> None:
    store = SqlStore(database_url)
    await store.open()
    assert await store.load() == EXPECTED
    await store.close()


@pytest.mark.usefixtures("previous")
async def test_a_database_that_was_brought_up_to_date_takes_everything_new(database_url: str) -> None:
    store = SqlStore(database_url)
    await store.open()
    await store.save_session(stored("ses-3", "gpu-1", ("qwen",), ("a1",)), evicted=["ses-1"])
    mesh = await store.load()
    await store.close()
    assert [each.profile.name for each in mesh.sessions] == ["gpu-1", "gpu-2"]
    assert mesh.sessions[0].agents == (agent("a1", "gpu-1"),)


@pytest.mark.usefixtures("previous")
async def test_opening_twice_migrates_once(database_url: str) -> None:
    store = SqlStore(database_url)
    for _ in range(2):
        await store.open()
        assert await store.load() == EXPECTED
        await store.close()


@pytest.mark.parametrize("begin_with", ["nothing", "the previous release"])
async def test_the_migrations_make_exactly_the_tables_the_code_expects(
    begin_with: str, engine: AsyncEngine, database_url: str
) -> None:
    if begin_with == "the previous release":
        async with engine.begin() as connection:
            await connection.run_sync(migrate, SCHEMA, PREVIOUS)
            assert await connection.run_sync(_differences) != []
    store = SqlStore(database_url)
    await store.open()
    await store.close()
    async with engine.begin() as connection:
        assert await connection.run_sync(_differences) == []
        await connection.exec_driver_sql("ALTER TABLE declared_agents DROP COLUMN description")
        assert len(await connection.run_sync(_differences)) == 1


async def test_a_migration_that_fails_leaves_the_previous_schema_and_its_rows(
    previous: AsyncEngine, database_url: str
) -> None:
    async with previous.begin() as connection:
        # A leftover that the migration runs into late.
        await connection.exec_driver_sql("CREATE TABLE ownership (id INTEGER)")
    store = SqlStore(database_url)
    with pytest.raises(WeftError) as failure:
        await store.open()
    assert failure.value.reason is Reason.SERVICE_UNAVAILABLE
    async with previous.begin() as connection:
        tables = await connection.run_sync(_tables)
        assert tables == {"alembic_version", "sessions", "runners", "models", "ownership"}
        assert (await connection.exec_driver_sql("SELECT version_num FROM alembic_version")).scalar_one() == PREVIOUS
        await connection.exec_driver_sql("DROP TABLE ownership")
    await store.open()
    assert await store.load() == EXPECTED
    await store.close()


async def test_a_schema_of_a_newer_release_is_refused_and_left_alone(previous: AsyncEngine, database_url: str) -> None:
    async with previous.begin() as connection:
        await connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(WeftError, match="does not know") as refusal:
        await SqlStore(database_url).open()
    assert refusal.value.reason is Reason.SERVICE_UNAVAILABLE
    async with previous.begin() as connection:
        assert await connection.run_sync(_tables) == {"alembic_version", "sessions", "runners", "models"}
