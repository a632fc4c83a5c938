"""The tables of the book of memory as the code sees them; `migrations` makes them."""

from sqlalchemy import BigInteger, Boolean, Column, Integer, String, Table, Text

from registry_svc.store.tables import UtcDateTime, metadata
from weft.kernel.names import MAX_NAME_CHARS, MAX_REQUEST_ID_CHARS

MAX_PURPOSE_CHARS = 256
MAX_HOST_CHARS = 255

# A lease outlives sessions and runners: its memory must be seen back, whoever is gone. No foreign keys, therefore.
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

# One row: the highest fencing number that was ever given out. It stays when the leases are gone.
lease_counter = Table(
    "lease_counter",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("last_fencing_number", BigInteger, nullable=False),
)
