"""The tables of every service on every kind of database, and their migrations."""

import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from router_svc.store.tables import SCHEMA as ROUTER
from weft.sql.schema import Schema, bring_up_to_date, migrate

pytest_plugins = ("database_fixtures",)
pytestmark = pytest.mark.usefixtures("made_by_services")

SCHEMAS = [pytest.param(ROUTER, id="router")]


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(database_url)
    if engine.dialect.name == "sqlite":
        Path(str(engine.url.database)).parent.mkdir()
    yield engine
    await engine.dispose()


def _described(connection: Connection, schema: Schema) -> dict[str, Any]:
    """All that its database knows about each table, in an order that does not depend on how it came about."""
    look = inspect(connection)
    return {
        table: {
            "columns": {each["name"]: _plain(each) for each in look.get_columns(table)},
            "primary key": _plain(look.get_pk_constraint(table)),
            "foreign keys": sorted(map(_plain, look.get_foreign_keys(table))),
            "unique": sorted(map(_plain, look.get_unique_constraints(table))),
            "checks": sorted(map(_plain, look.get_check_constraints(table))),
            "indexes": sorted(map(_plain, look.get_indexes(table))),
        }
        for table in [*schema.metadata.tables, schema.version_table]
    }


def _plain(found: Any) -> str:
    """Types and conditions are compared as they are written."""
    if isinstance(found, Mapping):
        return str(sorted((name, _plain(value)) for name, value in found.items()))
    return str(found)


@pytest.mark.parametrize("schema", SCHEMAS)
async def test_one_that_was_made_at_once_has_nothing_left_to_migrate(schema: Schema, engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(bring_up_to_date, schema)
        before = await connection.run_sync(_described, schema)
        for step in (migrate, bring_up_to_date):
            await connection.run_sync(step, schema)
        assert await connection.run_sync(_described, schema) == before


async def test_tables_that_differ_in_an_index_or_a_column_are_told_apart(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(bring_up_to_date, ROUTER)
        whole = await connection.run_sync(_described, ROUTER)
        await connection.exec_driver_sql("DROP INDEX ix_tasks_lane")
        without_index = await connection.run_sync(_described, ROUTER)
        await connection.exec_driver_sql("ALTER TABLE tasks DROP COLUMN custom_id")
        assert whole != without_index != await connection.run_sync(_described, ROUTER)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_the_newest_revision_is_the_one_that_the_code_names(schema: Schema) -> None:
    assert ScriptDirectory(str(schema.scripts)).get_current_head() == schema.newest


@pytest.mark.slow("two processes that import the router")
def test_a_start_on_a_new_or_a_current_database_needs_no_migration_tool(tmp_path: Path) -> None:
    """It takes 7 MB of a host, for as long as that lives."""
    program = (
        "import asyncio, sys\n"
        "from router_svc.store.database import RouterDatabase\n"
        "async def start():\n"
        f"    database = RouterDatabase('sqlite+aiosqlite:///{tmp_path}/router.db')\n"
        "    await database.open()\n"
        "    await database.close()\n"
        "asyncio.run(start())\n"
        "print('alembic' in sys.modules)\n"
    )
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
        assert done.stdout.split() == ["False"]
