"""The schema that a router's database is brought to."""

from pathlib import Path

from router_svc.store.tables import metadata
from weft.sql.schema import Schema

SCHEMA = Schema(
    owner="router",
    metadata=metadata,
    scripts=Path(__file__).parent / "migrations",
    newest="0003",
    version_table="router_alembic_version",
)
