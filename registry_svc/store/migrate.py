"""Brings a database to the schema this code expects."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

_SCRIPTS = Path(__file__).parent / "migrations"


def upgrade(connection: Connection) -> None:
    """Run every migration that `connection`'s database has not seen, inside the transaction it is in."""
    config = Config(attributes={"connection": connection})
    # Config interpolates '%', which may well be part of an installation path.
    config.set_main_option("script_location", str(_SCRIPTS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    command.upgrade(config, "head")
