"""Migrates a database to this release's schema with numbered scripts.

A script such as `0020.sql` is written for PostgreSQL, with each statement ending in `;` at the end of a line;
`_SQLITE_TYPES` maps the types to SQLite's. The first script creates all tables; older databases are rejected.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from weft import __version__
from weft.api.operations.v1.process_service_pb2 import DatabaseSchema
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.sql.connections import Tx

MAX_NAMED_TABLES = 3
MIGRATION_LOCK = 0x7765_6674_726F_7574
"""Key of the advisory lock for concurrent migrations; unique to weft."""
_SQLITE_TYPES: Mapping[str, str] = {
    "BYTEA": "BLOB",
    "BIGSERIAL": "INTEGER",
    "TIMESTAMP WITH TIME ZONE": "DATETIME",
    "DOUBLE PRECISION": "DOUBLE",
}
_TYPES = re.compile("|".join(_SQLITE_TYPES))
_SERIAL_KEY = re.compile(r"BIGSERIAL [^,]*PRIMARY KEY")
"""SQLite needs AUTOINCREMENT to not reuse the numbers of deleted rows."""
_END = re.compile(r";\s*$", re.MULTILINE)
_TABLES = {
    "sqlite": "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'",
    "postgresql": "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()",
}


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The tables of one service, which may share a database with other services."""

    owner: str
    """Name of the service, for people."""
    scripts: Path
    version_table: str
    """Table with the database revision, separate for each service."""
    conversions: Mapping[str, Callable[[Tx], None]] = field(default_factory=dict)
    """What Python does after a script, by its number."""

    @cached_property
    def revisions(self) -> tuple[str, ...]:
        """Script numbers, the newest last."""
        return tuple(sorted(script.stem for script in self.scripts.glob("*.sql")))

    @property
    def newest(self) -> str:
        """The revision that this release expects."""
        return self.revisions[-1]


def schema_in(tx: Tx, schema: Schema) -> DatabaseSchema:
    """Returns a schema's revision as known to this process, and in the database."""
    found = tx.value(f"SELECT version_num FROM {schema.version_table}")  # noqa: S608 - the schema's table
    return DatabaseSchema(service=schema.owner, known_revision=schema.newest, database_revision=found or "")


def tables_in(tx: Tx) -> list[str]:
    """Returns the sorted names of all tables of a database."""
    return sorted(name for (name,) in tx.rows(_TABLES[tx.dialect]))


def bring_up_to_date(tx: Tx, schema: Schema, *, to: str = "") -> None:
    """Creates or migrates the tables, up to the revision `to`; only reads a database that is up to date.

    Raises SERVICE_UNAVAILABLE if the database has an unknown schema, or is a file of another program.
    """
    if tx.dialect == "postgresql":
        tx.execute("SELECT pg_advisory_xact_lock(:key)", key=MIGRATION_LOCK)
    tables = tables_in(tx)
    table = schema.version_table
    revision = tx.value(f"SELECT version_num FROM {table}") if table in tables else None  # noqa: S608 - as above
    if revision is None:
        _require_own_file(tx, tables)
        missing = schema.revisions
        tx.execute(
            f"CREATE TABLE IF NOT EXISTS {table} "
            f"(version_num VARCHAR(32) NOT NULL, CONSTRAINT {table}_pkc PRIMARY KEY (version_num))"
        )
    elif revision in schema.revisions:
        missing = schema.revisions[schema.revisions.index(revision) + 1 :]
    else:
        is_older = str(revision) < schema.revisions[0]
        known = f"its oldest is {schema.revisions[0]}" if is_older else f"its newest is {schema.newest}"
        remedy = "begin with a new database" if is_older else "a newer one"
        raise WeftError(
            Reason.SERVICE_UNAVAILABLE,
            f"it has the schema {revision}, which weft {__version__} does not know ({known}); run the release that "
            f"wrote it, or {remedy}",
        )
    missing = tuple(each for each in missing if not to or each <= to)
    if not missing:
        return
    for each in missing:
        for statement in statements_of(schema.scripts / f"{each}.sql", tx.dialect):
            tx.execute(statement)
        if convert := schema.conversions.get(each):
            convert(tx)
    tx.execute(f"DELETE FROM {table}")  # noqa: S608 - as above
    tx.execute(f"INSERT INTO {table} (version_num) VALUES (:newest)", newest=missing[-1])  # noqa: S608 - as above


def statements_of(script: Path, dialect: str) -> list[str]:
    """Returns the statements of a script."""
    text = script.read_text(encoding="utf-8")
    if dialect == "sqlite":
        text = _TYPES.sub(lambda found: _SQLITE_TYPES[found[0]], _SERIAL_KEY.sub(r"\g<0> AUTOINCREMENT", text))
    return [statement for part in _END.split(text) if (statement := part.strip())]


def _require_own_file(tx: Tx, tables: list[str]) -> None:
    """Raises SERVICE_UNAVAILABLE for a file with tables but no version table. On a server, databases are shared."""
    if tx.dialect == "sqlite" and tables and not any(name.endswith("alembic_version") for name in tables):
        raise WeftError(
            Reason.SERVICE_UNAVAILABLE,
            f"it belongs to another program (its tables: {', '.join(tables[:MAX_NAMED_TABLES])}); move it away, or "
            "name another file",
        )
