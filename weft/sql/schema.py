"""Brings a database to the tables that this release expects: made at once where there are none, else migrated."""

from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Column, Connection, MetaData, PrimaryKeyConstraint, String, Table, inspect, select

from weft import __version__
from weft.api.operations.v1.process_service_pb2 import DatabaseSchema
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

REVISION_CHARS = 32
MAX_NAMED_TABLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The tables of one service, which may share a database with those of others."""

    owner: str
    """The service, as people call it."""
    metadata: MetaData
    scripts: Path
    """The folder of its migrations."""
    newest: str
    """The revision at which its tables are as in `metadata`."""
    version_table: str
    """The table that holds the revision of the database. Every service has its own."""


def schema_in(connection: Connection, schema: Schema) -> DatabaseSchema:
    """Returns the revision of a schema that this process knows, and the one that the database has."""
    found = connection.execute(select(_version_table(schema).c.version_num)).scalar()
    return DatabaseSchema(service=schema.owner, known_revision=schema.newest, database_revision=found or "")


def bring_up_to_date(connection: Connection, schema: Schema) -> None:
    """Create or migrate the tables within `connection`'s transaction; an up-to-date database is only read.

    Raises SERVICE_UNAVAILABLE when the database has a schema that this release does not know, or is a file of another
    program: no tables are added beside its own.
    """
    versions = _version_table(schema)
    present = inspect(connection)
    known = present.has_table(versions.name)
    revision = connection.execute(select(versions.c.version_num)).scalar() if known else None
    if revision == schema.newest:
        return
    if revision is None:
        _require_own_file(connection)
        schema.metadata.create_all(connection, checkfirst=False)
        versions.create(connection, checkfirst=known)
        connection.execute(versions.insert().values(version_num=schema.newest))
        return
    migrate(connection, schema)


def migrate(connection: Connection, schema: Schema, revision: str = "head") -> None:
    """Run every migration up to `revision` that `connection`'s database has not seen, inside its transaction.

    Raises SERVICE_UNAVAILABLE when the database has a schema that this release does not know.
    """
    # Alembic takes 7 MB of a host for as long as the process lives, and is needed once per release.
    from alembic import command  # noqa: PLC0415
    from alembic.config import Config  # noqa: PLC0415
    from alembic.util import CommandError  # noqa: PLC0415

    config = Config(attributes={"connection": connection})
    # Config interpolates '%', which may well be part of an installation path.
    config.set_main_option("script_location", str(schema.scripts).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    try:
        command.upgrade(config, revision)
    except CommandError as error:
        found = schema_in(connection, schema).database_revision
        raise WeftError(
            Reason.SERVICE_UNAVAILABLE,
            f"it has the schema {found}, which weft {__version__} does not know (its newest is {schema.newest}); run "
            "the release that wrote it, or a newer one",
        ) from error


def _require_own_file(connection: Connection) -> None:
    """A file with tables, and none of them a version table, is not ours; on a server databases are shared."""
    if connection.dialect.name != "sqlite":
        return
    found = sorted(inspect(connection).get_table_names())
    if found and not any(name.endswith("alembic_version") for name in found):
        raise WeftError(
            Reason.SERVICE_UNAVAILABLE,
            f"it belongs to another program (its tables: {', '.join(found[:MAX_NAMED_TABLES])}); move it away, or name "
            "another file",
        )


def _version_table(schema: Schema) -> Table:
    """As alembic makes it."""
    return Table(
        schema.version_table,
        MetaData(),
        Column("version_num", String(REVISION_CHARS), nullable=False),
        PrimaryKeyConstraint("version_num", name=f"{schema.version_table}_pkc"),
    )
