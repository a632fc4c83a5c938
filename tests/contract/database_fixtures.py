"""Databases for the tests of the store: a pytest plugin, because one server serves all of their modules."""

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from registry_svc.mesh.store import SqlStore
from weft_testing.postgres_server import PYTHON_OF_THE_WHEEL, PostgresServer, running_postgres

USES_POSTGRES = pytest.mark.slow("a PostgreSQL server")


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
    with running_postgres() as server:
        yield server


@pytest.fixture
def postgres_database(postgres: PostgresServer) -> Iterator[str]:
    """The name of an empty database of this test's own."""
    with postgres.fresh_database() as name:
        yield name


@pytest.fixture
def postgres_url(postgres: PostgresServer, postgres_database: str) -> str:
    """The same, as a URL."""
    return postgres.url(postgres_database)


class Admin:
    """A connection of somebody else to the same database."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.transaction = connection.transaction

    async def execute(self, statement: str, *values: Any) -> Any:
        return await self._connection.execute(statement, values or None)

    async def fetchval(self, statement: str, *values: Any) -> Any:
        """The first column of the first row."""
        return (await (await self.execute(statement, *values)).fetchone())[0]


@pytest.fixture
async def admin(postgres_url: str) -> AsyncIterator[Admin]:
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
        yield Admin(connection)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A file in a folder that is not there yet, with a character that configuration files interpolate."""
    return f"sqlite:///{tmp_path}/per%cent/registry.db"


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
