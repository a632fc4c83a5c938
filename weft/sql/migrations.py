"""Migrations of an older database, by alembic."""

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.sql.schema import Schema


def migrate(connection: Connection, schema: Schema, revision: str = "head") -> None:
    """Run every migration up to `revision` that `connection`'s database has not seen, inside its transaction.

    Raises SERVICE_UNAVAILABLE when the database has a schema that this release does not know.
    """
    config = Config(attributes={"connection": connection})
    # Config interpolates '%', which may well be part of an installation path.
    config.set_main_option("script_location", str(schema.scripts).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    try:
        command.upgrade(config, revision)
    except CommandError as error:
        raise WeftError(
            Reason.SERVICE_UNAVAILABLE,
            "it has a schema this release does not know; run the release that wrote it, or a newer one",
        ) from error
