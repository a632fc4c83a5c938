"""The registry's schema: every table as the code sees it. `migrations` brings older databases to it.

All tables are here, whichever feature reads them, because a new database is created from `SCHEMA` at once.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    false,
)

from weft.kernel.names import MAX_NAME_CHARS, MAX_REQUEST_ID_CHARS, MAX_TENANT_CHARS
from weft.sql.schema import Schema


class UtcDateTime(TypeDecorator[datetime]):
    """A moment with zone UTC, also on databases that forget zones (SQLite)."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """UTC in."""
        del dialect
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: Any | None, dialect: Dialect) -> datetime | None:
        """UTC out."""
        del dialect
        if value is None:
            return None
        moment: datetime = value
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


MAX_ADDRESS_CHARS = 512

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
    }
)

sessions = Table(
    "sessions",
    metadata,
    Column("id", String(MAX_NAME_CHARS), primary_key=True),
    Column("request_id", String(MAX_NAME_CHARS), nullable=False),
    Column("ticket_key", LargeBinary, nullable=False),
)

runners = Table(
    "runners",
    metadata,
    Column("name", String(MAX_NAME_CHARS), primary_key=True),
    Column("session_id", ForeignKey(sessions.c.id, ondelete="CASCADE"), nullable=False, unique=True),
    Column("incarnation", String(MAX_NAME_CHARS), nullable=False),
    Column("address", String(MAX_ADDRESS_CHARS), nullable=False),
    Column("host", String(255), nullable=False),
    Column("runtime", String(MAX_NAME_CHARS), nullable=False),
    Column("version", String(MAX_NAME_CHARS), nullable=False),
    Column("standing", String(16), nullable=False),
    Column("last_heartbeat_at", UtcDateTime, nullable=False),
    Column("inactive_since", UtcDateTime, nullable=True),
    Column("dial_out", Boolean, nullable=False, server_default=false()),
)


def _manifest_columns() -> list[Column[Any]]:
    return [
        Column("name", String(MAX_NAME_CHARS), primary_key=True),
        Column("pool_name", String(MAX_NAME_CHARS), nullable=False),
        Column("operations", String(64), nullable=False),
        Column("context_tokens", Integer, nullable=False),
        Column("digest", String(128), nullable=False),
        Column("remote", Boolean, nullable=False),
        Column("wake", Text, nullable=True),
        Column("skills", String(64), nullable=True),
        # Tier, labels and owner, a serialized Tags.
        Column("tags", LargeBinary, nullable=True),
        Column("upstream", Text, nullable=True),
        Column("journal", String(16), nullable=True),
        Column("created_at", UtcDateTime, nullable=False),
    ]


def _agent_columns() -> list[Column[Any]]:
    # The target of an agent has no foreign key: it may be declared, published or gone, and is deletable on its own.
    return [
        Column("name", String(MAX_NAME_CHARS), primary_key=True),
        Column("target", String(MAX_NAME_CHARS), nullable=False),
        Column("targets_pool", Boolean, nullable=False),
        Column("description", Text, nullable=False),
        Column("system_prompt", Text, nullable=False),
        Column("default_params", Text, nullable=False),
        Column("behaviour", Text, nullable=True),
        Column("tags", LargeBinary, nullable=True),
        Column("created_at", UtcDateTime, nullable=False),
    ]


def _publisher_column() -> Column[Any]:
    return Column("runner", ForeignKey(runners.c.name, ondelete="CASCADE"), nullable=False, index=True)


models = Table("models", metadata, *_manifest_columns(), _publisher_column())
agents = Table("agents", metadata, *_agent_columns(), _publisher_column())

# A declaration outlives runners and may name one that does not exist yet: text, not a foreign key.
declared_models = Table(
    "declared_models",
    metadata,
    *_manifest_columns(),
    Column("runner", String(MAX_NAME_CHARS), nullable=False),
    # The provider of a central model, a serialized ModelProvider.
    Column("provider", LargeBinary, nullable=True),
)
declared_agents = Table("declared_agents", metadata, *_agent_columns())
# Candidates of a route have no foreign key either: a pool has no row, and published models come and go.
declared_routes = Table(
    "declared_routes",
    metadata,
    Column("name", String(MAX_NAME_CHARS), primary_key=True),
    Column("description", Text, nullable=False),
    Column("candidates", Text, nullable=False),
    Column("budget_seconds", Float, nullable=True),
    Column("keep_alive_seconds", Float, nullable=True),
    Column("pin_primary", Boolean, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
)

declared_aliases = Table(
    "declared_aliases",
    metadata,
    Column("name", String(MAX_NAME_CHARS), primary_key=True),
    Column("manifest", LargeBinary, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
)

declared_profiles = Table(
    "declared_profiles",
    metadata,
    Column("name", String(MAX_NAME_CHARS), primary_key=True),
    Column("manifest", LargeBinary, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    # Set for at most one: the profile that the mesh was switched to.
    Column("active_since", UtcDateTime, nullable=True),
)

declared_workflows = Table(
    "declared_workflows",
    metadata,
    Column("name", String(MAX_NAME_CHARS), primary_key=True),
    Column("manifest", LargeBinary, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
)

declared_tenants = Table(
    "declared_tenants",
    metadata,
    Column("name", String(MAX_NAME_CHARS), primary_key=True),
    Column("manifest", LargeBinary, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
)

# One row: the settings of the whole mesh.
mesh_settings = Table(
    "mesh_settings",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("allow_cloud_fallback", Boolean, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("journal", String(16), nullable=True),
)

join_tokens = Table(
    "join_tokens",
    metadata,
    Column("id", String(MAX_NAME_CHARS), primary_key=True),
    Column("description", Text, nullable=False),
    Column("secret_sha256", String(64), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("expires_at", UtcDateTime, nullable=True),
)

# One row: the registry that opened the database last. PostgreSQL's ownership is checked against it, see
# `weft.sql.owned_postgres`.
ownership = Table(
    "ownership",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("owner", String(64), nullable=False),
    # Where it serves, and the process of the server that serves its connection.
    Column("address", String(MAX_ADDRESS_CHARS), nullable=True),
    Column("backend_pid", Integer, nullable=True),
    # Its heartbeats: their number, and the time of the last one by the database's clock.
    Column("beat", BigInteger, nullable=True),
    Column("beat_at", UtcDateTime, nullable=True),
)


MAX_PURPOSE_CHARS = 256
MAX_HOST_CHARS = 255

# A lease outlives sessions and runners: its memory must be observed as free first. So there are no foreign keys.
leases = Table(
    "leases",
    metadata,
    Column("id", String(MAX_NAME_CHARS), primary_key=True),
    Column("fencing_number", BigInteger, nullable=False, unique=True),
    Column("request_id", String(MAX_REQUEST_ID_CHARS), nullable=False),
    Column("host", String(MAX_HOST_CHARS), nullable=False),
    Column("holder_kind", Integer, nullable=False),
    Column("holder_name", String(MAX_NAME_CHARS), nullable=False),
    Column("holder_incarnation", String(MAX_NAME_CHARS), nullable=False),
    Column("purpose", String(MAX_PURPOSE_CHARS), nullable=False),
    # JSON: [[device index, bytes], ...] and [[pid, start ticks], ...].
    Column("shares", Text, nullable=False),
    Column("processes", Text, nullable=False),
    Column("pinned", Boolean, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("releasing", Boolean, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
)

# One row: the highest fencing number ever issued. It stays when the leases are deleted.
lease_counter = Table(
    "lease_counter",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("last_fencing_number", BigInteger, nullable=False),
)


operations = Table(
    "operations",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("id", String(MAX_NAME_CHARS), nullable=False, unique=True),
    Column("request_id", String(MAX_NAME_CHARS), nullable=False, unique=True),
    Column("action", LargeBinary, nullable=False),
    Column("state", String(16), nullable=False),
    Column("requested_by", Text, nullable=False),
    Column("signers", Text, nullable=False),
    Column("runner", String(MAX_NAME_CHARS), nullable=False),
    Column("reason", String(64), nullable=False),
    Column("detail", Text, nullable=False),
    Column("result", LargeBinary, nullable=False),
    Column("cancel_requested", Boolean, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("started_at", UtcDateTime, nullable=True),
    Column("ended_at", UtcDateTime, nullable=True, index=True),
)

audit_entries = Table(
    "audit_entries",
    metadata,
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    Column("at", UtcDateTime, nullable=False),
    Column("event", String(64), nullable=False),
    Column("actor", Text, nullable=False),
    Column("operation", String(160), nullable=False),
    Column("detail", Text, nullable=False),
    Column("previous_hash", String(64), nullable=False),
    Column("hash", String(64), nullable=False),
)

used_nonces = Table(
    "used_nonces",
    metadata,
    Column("nonce", String(MAX_NAME_CHARS), primary_key=True),
    Column("operation_id", String(MAX_NAME_CHARS), nullable=False),
    Column("kept_until", UtcDateTime, nullable=False, index=True),
)

# One row: the registry's own id, and the newest time at which an accepted authorization was issued.
governance_marks = Table(
    "governance_marks",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("audience", String(MAX_NAME_CHARS), nullable=False),
    Column("newest_issued_at", UtcDateTime, nullable=True),
)


api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String(MAX_NAME_CHARS), primary_key=True),
    Column("description", Text, nullable=False),
    Column("tenant", String(MAX_TENANT_CHARS), nullable=False),
    # JSON: ["inference:create", ...].
    Column("scopes", Text, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("previous_digest", LargeBinary, nullable=False),
    Column("previous_expires_at", UtcDateTime, nullable=True),
    Column("created_at", UtcDateTime, nullable=False),
    Column("expires_at", UtcDateTime, nullable=True),
    Column("revoked_at", UtcDateTime, nullable=True),
    Column("rotated_at", UtcDateTime, nullable=True),
)

# One row: which pepper the digests were made with, so that another one shows.
key_pepper = Table(
    "key_pepper",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("mark", LargeBinary, nullable=False),
)

# The values are encrypted with a key that is not in the database.
secrets = Table(
    "secrets",
    metadata,
    Column("name", String(MAX_NAME_CHARS), primary_key=True),
    Column("version", BigInteger, nullable=False),
    # Which key it is encrypted with.
    Column("key_id", String(16), nullable=False),
    Column("sealed", LargeBinary, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
)

# The newest events, at most `RegistryConfig.max_events`; a killed registry loses those since its last sweep.
events = Table(
    "events",
    metadata,
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    # A serialized Event.
    Column("event", LargeBinary, nullable=False),
)

# Routers with a session, so that gateways know them after a restart of the registry.
routers = Table(
    "routers",
    metadata,
    Column("name", String(MAX_NAME_CHARS), primary_key=True),
    Column("incarnation", String(MAX_NAME_CHARS), nullable=False),
    Column("address", String(512), nullable=False),
    Column("version", String(MAX_NAME_CHARS), nullable=False),
    Column("registered_at", UtcDateTime, nullable=False),
)

SCHEMA = Schema(
    owner="registry",
    metadata=metadata,
    scripts=Path(__file__).parent / "migrations",
    newest="0018",
    version_table="alembic_version",
)
