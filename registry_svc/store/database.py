"""The registry's database: its schema and owner role."""

from pathlib import Path

from weft.kernel.errors.reasons import Reason
from weft.sql.migrations import Schema
from weft.sql.owners import OwnerRole
from weft.sql.store import Store

SCHEMA = Schema(owner="registry", scripts=Path(__file__).parent / "schema", version_table="alembic_version")
REGISTRY_OWNER = OwnerRole(
    service="registry",
    table="ownership",
    standby_reason=Reason.REGISTRY_STANDBY,
    advice="name both in WEFT_REGISTRY (commands), or in addresses.registry of weft.yaml, to call the one that serves",
    locks_file=True,
)


class RegistryDatabase(Store):
    """The registry's database, owned by one registry."""

    def __init__(self, database_url: str | Path, address: str = "") -> None:
        """`address` is where this registry serves, to which a standby refers its callers."""
        super().__init__(database_url, "registry", schema=SCHEMA, role=REGISTRY_OWNER, address=address)
