"""The tables of operations as the code sees them; `migrations` makes them."""

from sqlalchemy import BigInteger, Boolean, Column, Integer, LargeBinary, String, Table, Text

from registry_svc.store.tables import UtcDateTime, metadata
from weft.kernel.names import MAX_NAME_CHARS

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
