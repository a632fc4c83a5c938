"""Migrations of a service's tables, on every kind of database: a made-up schema of two revisions."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Column, Connection, Integer, MetaData, PrimaryKeyConstraint, String, Table, inspect, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.sql.database import SqliteEngine
from weft.sql.schema import Schema, bring_up_to_date, migrate

pytest_plugins = ("database_fixtures",)
pytestmark = pytest.mark.usefixtures("made_by_services")

ENV = """
from alembic import context

context.configure(
    connection=context.config.attributes["connection"], version_table="things_version", transactional_ddl=True
)
with context.begin_transaction():
    context.run_migrations()
"""
FIRST = """
revision, down_revision, branch_labels, depends_on = "0001", None, None, None

def upgrade():
    pass
"""
SECOND = """
import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "0002", "0001", None, None

def upgrade():
    op.add_column("things", sa.Column("color", sa.String(16), nullable=True))
    op.create_table("places", sa.Column("id", sa.Integer, primary_key=True))
"""


def _tables(*, is_newest: bool) -> MetaData:
    metadata = MetaData()
    columns: list[Column[Any]] = [Column("id", Integer, nullable=False), Column("name", String(16), nullable=False)]
    if is_newest:
        columns.append(Column("color", String(16), nullable=True))
        Table("places", metadata, Column("id", Integer, primary_key=True))
    Table("things", metadata, *columns, PrimaryKeyConstraint("id", name="pk_things"))
    return metadata


def _schema(scripts: Path, *, is_newest: bool) -> Schema:
    return Schema(
        owner="things",
        metadata=_tables(is_newest=is_newest),
        scripts=scripts,
        newest="0002" if is_newest else "0001",
        version_table="things_version",
    )


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    folder = tmp_path / "migrations"
    (folder / "versions").mkdir(parents=True)
    (folder / "env.py").write_text(ENV)
    (folder / "versions" / "first.py").write_text(FIRST)
    (folder / "versions" / "second.py").write_text(SECOND)
    return folder


@pytest.fixture
async def engine(database_url: str, scripts: Path) -> AsyncIterator[AsyncEngine]:
    """A database of the first revision, with a row in it."""
    url = make_url(database_url)
    engine = SqliteEngine(url) if url.get_backend_name() == "sqlite" else create_async_engine(url)
    if url.get_backend_name() == "sqlite":
        Path(str(url.database)).parent.mkdir()
    async with engine.begin() as connection:
        await connection.run_sync(bring_up_to_date, _schema(scripts, is_newest=False))
        await connection.exec_driver_sql("INSERT INTO things (id, name) VALUES (1, 'lamp')")
    yield engine
    await engine.dispose()


def _state(connection: Connection) -> tuple[set[str], str]:
    revision = connection.exec_driver_sql("SELECT version_num FROM things_version").scalar_one()
    return set(inspect(connection).get_table_names()), revision


async def test_an_older_database_gets_what_is_new_and_keeps_its_rows(engine: AsyncEngine, scripts: Path) -> None:
    for _ in range(2):
        async with engine.begin() as connection:
            await connection.run_sync(bring_up_to_date, _schema(scripts, is_newest=True))
    async with engine.begin() as connection:
        assert await connection.run_sync(_state) == ({"things", "places", "things_version"}, "0002")
        row = (await connection.exec_driver_sql("SELECT id, name, color FROM things")).one()
    assert tuple(row) == (1, "lamp", None)


async def test_a_migration_that_fails_halfway_leaves_the_older_database(engine: AsyncEngine, scripts: Path) -> None:
    async with engine.begin() as connection:
        await connection.exec_driver_sql("CREATE TABLE places (id INTEGER)")
    with pytest.raises(Exception, match="places"):
        async with engine.begin() as connection:
            await connection.run_sync(migrate, _schema(scripts, is_newest=True))
    async with engine.begin() as connection:
        assert await connection.run_sync(_state) == ({"things", "places", "things_version"}, "0001")
        assert tuple((await connection.exec_driver_sql("SELECT * FROM things")).one()) == (1, "lamp")


@pytest.mark.parametrize("revision", ["9999", "0000"])
async def test_a_database_of_an_unknown_revision_is_refused_and_left_alone(
    revision: str, engine: AsyncEngine, scripts: Path
) -> None:
    """A newer release wrote it, or one from before the first that is supported."""
    async with engine.begin() as connection:
        await connection.exec_driver_sql(f"UPDATE things_version SET version_num = '{revision}'")
    with pytest.raises(WeftError, match=f"it has the schema {revision}, which weft .* does not know") as refusal:
        async with engine.begin() as connection:
            await connection.run_sync(bring_up_to_date, _schema(scripts, is_newest=True))
    assert refusal.value.reason is Reason.SERVICE_UNAVAILABLE
    async with engine.begin() as connection:
        assert await connection.run_sync(_state) == ({"things", "things_version"}, revision)
