"""The schema that the registry's database is brought to."""

from pathlib import Path

from registry_svc.store import key_tables, lease_tables, operation_tables
from registry_svc.store.tables import metadata
from weft.sql.schema import Schema

# Tables are known to `metadata` once their modules have been read.
assert lease_tables.leases.metadata is operation_tables.operations.metadata is metadata
assert key_tables.api_keys.metadata is metadata

SCHEMA = Schema(
    owner="registry",
    metadata=metadata,
    scripts=Path(__file__).parent / "migrations",
    newest="0007",
    version_table="alembic_version",
)
