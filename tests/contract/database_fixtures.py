"""Databases for the tests of the store: a pytest plugin, because one server serves all of their modules."""

import sys
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, MetaData, create_mock_engine
from sqlalchemy.dialects.postgresql.asyncpg import dialect
from sqlalchemy.schema import DDLElement
from sqlalchemy.util import await_only

from registry_svc.mesh.store import SqlStore
from weft_testing.postgres_server import PYTHON_OF_THE_WHEEL, PostgresServer, running_postgres

USES_POSTGRES = pytest.mark.slow("a PostgreSQL server")


_create_all = MetaData.create_all


@cache
def script_of(metadata: MetaData) -> str:
    """Returns what makes the tables and indexes on PostgreSQL."""
    statements: list[str] = []

    def keep(statement: DDLElement, *_: object) -> None:
        statements.append(str(statement.compile(dialect=dialect())))  # type: ignore[no-untyped-call]

    _create_all(metadata, create_mock_engine("postgresql://", keep), checkfirst=False)
    return ";\n".join(statements)


def create_all(metadata: MetaData, bind: Engine | Connection, **options: Any) -> None:
    """As `MetaData.create_all`, which sends each statement of a new database by itself, for 0.2 s in most tests."""
    if isinstance(bind, Connection) and bind.dialect.driver == "asyncpg" and options == {"checkfirst": False}:
        # The driver begins a transaction with its first statement: the script belongs in it.
        bind.exec_driver_sql("SELECT 1")
        await_only(bind.connection.driver_connection.execute(script_of(metadata)))  # type: ignore[union-attr]
    else:
        _create_all(metadata, bind, **options)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that use the server, before those of later tiers are deselected."""
    for item in items:
        if "postgres" in getattr(item, "fixturenames", ()) and item.get_closest_marker("nightly") is None:
            item.add_marker(USES_POSTGRES)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """The server."""
    if sys.version_info[:2] > PYTHON_OF_THE_WHEEL:
        pytest.skip("there is no wheel pgserver for this Python")
    with running_postgres() as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetaData, "create_all", create_all)
        yield server


@pytest.fixture
def made_by_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of a test whose subject they are are made on PostgreSQL as a service makes them."""
    monkeypatch.setattr(MetaData, "create_all", _create_all)


@pytest.fixture
def postgres_database(postgres: PostgresServer) -> Iterator[str]:
    """The name of an empty database of this test's own."""
    with postgres.fresh_database() as name:
        yield name


@pytest.fixture
def postgres_url(postgres: PostgresServer, postgres_database: str) -> str:
    """The same, as a URL."""
    return postgres.url(postgres_database)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A file in a folder that is not there yet, with a character that configuration files interpolate."""
    return f"sqlite+aiosqlite:///{tmp_path}/per%cent/registry.db"


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=USES_POSTGRES)])
def database_url(request: pytest.FixtureRequest) -> str:
    """An empty database of each kind that outlives its store."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[SqlStore]:
    """Open, empty, closed afterwards."""
    store = SqlStore(database_url)
    await store.open()
    yield store
    await store.close()
