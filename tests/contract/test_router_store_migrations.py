"""A router's database of the previous release becomes this one's, on every kind of database."""

from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, func, inspect, select
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from stored_tasks import a_row, seen, store_on

import router_svc.durable.stored_responses
from router_svc.durable.limits import ResponseLimits
from router_svc.store.database import RouterDatabase
from router_svc.store.tables import SCHEMA, metadata, responses
from weft.api.router.v1 import stored_response_service_pb2, task_pb2
from weft.kernel.timestamps import stamp_of
from weft.sql.schema import migrate

pytest_plugins = ("database_fixtures",)

PREVIOUS, VERSIONS = "0001", "router_alembic_version"
MADE = datetime(2026, 11, 20, 12, 0, 0, 123456, tzinfo=UTC)
KEPT = stored_response_service_pb2.StoredResponse(
    id="resp_1", tenant="ann", previous_id="", create_time=stamp_of(MADE), body=b"\x00\xff", items=b"[]"
)


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    """The same database, past the router."""
    engine = create_async_engine(database_url)
    if engine.dialect.name == "sqlite":
        _folder_of(engine).mkdir()
    yield engine
    await engine.dispose()


def _folder_of(engine: AsyncEngine) -> Path:
    return Path(str(engine.url.database)).parent


def _tables(connection: Connection) -> set[str]:
    return set(inspect(connection).get_table_names())


def _differences(connection: Connection) -> Sequence[object]:
    options = {"compare_type": True, "compare_server_default": True, "version_table": VERSIONS}
    return list(compare_metadata(MigrationContext.configure(connection, opts=options), metadata))


async def _make_previous(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(migrate, SCHEMA, PREVIOUS)
        assert await connection.run_sync(_tables) == {VERSIONS, "responses"}
        values = {"id": KEPT.id, "tenant": KEPT.tenant, "previous_id": "", "created_at": MADE, "size": 4}
        await connection.execute(responses.insert(), {**values, "body": KEPT.body, "items": KEPT.items})


async def test_a_database_of_the_previous_release_keeps_its_answers_and_takes_tasks(
    engine: AsyncEngine, database_url: str
) -> None:
    await _make_previous(engine)
    database = RouterDatabase(database_url)
    service = router_svc.durable.stored_responses.build(database, ResponseLimits(keep_seconds=1e9))
    await service.start()
    assert await service.store.get("ann", "resp_1") == KEPT
    await service.stop(0)
    store = store_on(database_url)
    await store.start()
    await store.submit(a_row("task-1"))
    assert (await seen(store, "task-1")).state == task_pb2.TASK_STATE_PENDING
    await store.stop()


@pytest.mark.parametrize("is_new", [True, False])
async def test_the_schema_is_the_one_that_the_code_has(engine: AsyncEngine, database_url: str, *, is_new: bool) -> None:
    if not is_new:
        await _make_previous(engine)
    database = RouterDatabase(database_url)
    await database.open()
    await database.close()
    async with engine.connect() as connection:
        assert await connection.run_sync(_differences) == []
        assert await connection.run_sync(_partial_indexes) == PARTIAL


async def test_a_schema_that_differs_is_found(engine: AsyncEngine, database_url: str) -> None:
    database = RouterDatabase(database_url)
    await database.open()
    await database.close()
    async with engine.begin() as connection:
        await connection.exec_driver_sql("DROP INDEX ix_tasks_lane")
        await connection.exec_driver_sql("ALTER TABLE tasks DROP COLUMN custom_id")
    async with engine.connect() as connection:
        assert len(await connection.run_sync(_differences)) == 2


async def test_numbers_of_forgotten_tasks_are_not_given_again(engine: AsyncEngine, database_url: str) -> None:
    store = store_on(database_url)
    await store.start()
    numbers = []
    for name in ("task-1", "task-2"):
        await store.submit(a_row(name))
        async with engine.connect() as connection:
            numbers.append((await connection.execute(select(func.max(metadata.tables["tasks"].c.seq)))).scalar_one())
        await store.cancel("ann", name, 0.0)
        await store.delete("ann", name)
    assert numbers[0] < numbers[1]
    await store.stop()


PARTIAL = {f"ix_tasks_{name}" for name in ("lane", "ready", "expiry", "lease", "ended", "kept")}


def _partial_indexes(connection: Connection) -> set[str]:
    """Of tasks, those of some rows: the comparison does not look at which."""
    if connection.dialect.name == "sqlite":
        query = "SELECT name FROM sqlite_master WHERE tbl_name = 'tasks' AND sql LIKE '%WHERE state%'"
    else:
        query = "SELECT indexname FROM pg_indexes WHERE tablename = 'tasks' AND indexdef LIKE '%WHERE (state%'"
    return set(connection.exec_driver_sql(query).scalars())
