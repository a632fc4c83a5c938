"""The tables of API keys as the code sees them; `migrations` makes them."""

from sqlalchemy import Column, Integer, LargeBinary, String, Table, Text

from registry_svc.store.tables import UtcDateTime, metadata
from weft.kernel.names import MAX_NAME_CHARS, MAX_TENANT_CHARS

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
