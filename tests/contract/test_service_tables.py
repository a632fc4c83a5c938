"""The tables of each service: those of the previous release, on every kind of database."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from registry_svc.store.database import SCHEMA as REGISTRY
from router_svc.store.database import SCHEMA as ROUTER
from weft.sql.migrations import Schema, statements_of
from weft.sql.store import Store

pytest_plugins = ("database_fixtures",)

CORPUS = Path(__file__).parent.parent / "corpus" / "databases" / "0.1.0"
SCHEMAS = [pytest.param(REGISTRY, id="registry"), pytest.param(ROUTER, id="router")]
_TABLES = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%' AND name NOT LIKE '%version'"


def _described(script: str) -> dict[str, Any]:
    """All that SQLite knows about each table that a script makes, in an order that does not depend on the script's."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(script)

        def look(pragma: str, name: str) -> list[Any]:
            return database.execute(f"SELECT * FROM pragma_{pragma}(?)", (name,)).fetchall()

        return {
            table: {
                "columns": {row[1]: (row[2], row[3], _plain(row[4]), row[5]) for row in look("table_info", table)},
                "foreign keys": sorted(row[2:] for row in look("foreign_key_list", table)),
                "indexes": sorted(
                    (row[2], row[3], row[4], [column[2] for column in look("index_info", row[1])])
                    for row in look("index_list", table)
                ),
            }
            for (table,) in database.execute(_TABLES)
        }


def _plain(default: str | None) -> str | None:
    return {"false": "0", "true": "1", "'0'": "0"}.get(default or "", default)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_first_script_creates_the_tables_of_the_previous_release(schema: Schema) -> None:
    script = ";\n".join(statements_of(schema.scripts / f"{schema.revisions[0]}.sql", "sqlite"))
    assert _described(script) == _described((CORPUS / f"{schema.owner}.sql").read_text())


@pytest.mark.parametrize("schema", SCHEMAS)
async def test_up_to_date_database_is_unchanged(schema: Schema, database_url: str) -> None:
    for _ in range(2):
        store = Store(database_url, schema.owner, schema=schema)
        await store.open()
        assert (await store.schema()).database_revision == schema.newest
        await store.close()
