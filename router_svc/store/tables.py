"""The tables of a router's database, and the schema that migrations bring it to."""

from pathlib import Path

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    DateTime,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    String,
    Table,
    Text,
    UniqueConstraint,
    event,
    text,
)

from weft.sql.schema import Schema

MAX_ID_CHARS = 128
MAX_MODEL_CHARS = 320
MAX_CALLER_CHARS = 128
MAX_KEY_CHARS = 255
MAX_TENANT_CHARS = 128
MAX_MEDIA_TYPE_CHARS = 128
MAX_ROUTER_CHARS = 128

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
    }
)
# SQLite autoincrements only columns of type INTEGER.
_Number = BigInteger().with_variant(Integer, "sqlite")

responses = Table(
    "responses",
    metadata,
    Column("id", String(MAX_ID_CHARS), nullable=False),
    Column("tenant", String(MAX_TENANT_CHARS), nullable=False),
    Column("previous_id", String(MAX_ID_CHARS), nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("size", Integer, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("items", LargeBinary, nullable=False),
    PrimaryKeyConstraint("id"),
    Index(None, "tenant"),
    Index(None, "created_at"),
)
"""Stored responses. `size` is the bytes of `body` and `items`."""

_WHERE = "where"
"""Of an index over some of the rows: their condition. `_state_conditions` says it in the database's own option; naming
PostgreSQL's here would import its dialect at each start of a mesh on SQLite.
"""


tasks = Table(
    "tasks",
    metadata,
    Column("seq", _Number, nullable=False, autoincrement=True),
    Column("id", String(MAX_ID_CHARS), nullable=False),
    Column("tenant", String(MAX_TENANT_CHARS), nullable=False),
    Column("idempotency_key", String(MAX_KEY_CHARS), nullable=True),
    Column("digest", LargeBinary, nullable=False),
    Column("state", SmallInteger, nullable=False),
    Column("model", String(MAX_MODEL_CHARS), nullable=False),
    Column("band", SmallInteger, nullable=False),
    Column("batch_id", String(MAX_ID_CHARS), nullable=False),
    Column("line", Integer, nullable=False),
    Column("custom_id", Text, nullable=False),
    Column("origin_kind", String(64), nullable=False),
    Column("caller", String(MAX_CALLER_CHARS), nullable=False),
    Column("request_id", String(MAX_ID_CHARS), nullable=True),
    Column("labels", LargeBinary, nullable=True),
    Column("attempt", Integer, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("max_attempts", Integer, nullable=False),
    Column("owner", String(MAX_ID_CHARS), nullable=False),
    Column("lease_until", Double, nullable=True),
    Column("lease_seconds", Double, nullable=True),
    Column("pending_limit_seconds", Double, nullable=False),
    Column("window_ends_at", Double, nullable=True),
    Column("ready_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double, nullable=True),
    Column("ended_at", Double, nullable=True),
    Column("last_index", Integer, nullable=False),
    Column("result_size", BigInteger, nullable=False),
    Column("request_size", BigInteger, nullable=False, server_default="0"),
    Column("error_reason", SmallInteger, nullable=False),
    Column("error_message", Text, nullable=False),
    PrimaryKeyConstraint("seq"),
    UniqueConstraint("id"),
    Index("ix_tasks_key", "tenant", "idempotency_key", unique=True),
    Index("ix_tasks_tenant_seq", "tenant", "seq"),
    Index("ix_tasks_batch", "batch_id", "line"),
    Index("ix_tasks_request", "request_id", info={_WHERE: "request_id IS NOT NULL"}),
    Index("ix_tasks_lane", "model", "tenant", "band", "seq", info={_WHERE: "state = 1"}),
    Index("ix_tasks_ready", "ready_at", info={_WHERE: "state = 1"}),
    Index("ix_tasks_expiry", "expires_at", info={_WHERE: "state = 1"}),
    Index("ix_tasks_lease", "lease_until", info={_WHERE: "state = 2"}),
    Index("ix_tasks_ended", "ended_at", info={_WHERE: "state > 2"}),
    Index("ix_tasks_kept", "tenant", "ended_at", info={_WHERE: "state > 2"}),
    sqlite_autoincrement=True,
)
"""Durable tasks. Times are UTC seconds since the epoch; `state` as in weft.durable.tasks; `attempt` is part of the
fence, `failures` are the failed attempts that count; `batch_id` is empty for none; `lease_seconds` is the length of the
lease that ends at `lease_until`; `labels` is a TaskSpec with `user` and `metadata` alone, null for neither."""


@event.listens_for(tasks, "before_create")
def _state_conditions(table: Table, connection: Connection, **_: object) -> None:
    for index in table.indexes:
        if _WHERE in index.info:
            index.dialect_kwargs[f"{connection.dialect.name}_where"] = text(index.info[_WHERE])


task_specs = Table(
    "task_specs",
    metadata,
    Column("task_id", String(MAX_ID_CHARS), ForeignKey("tasks.id", ondelete="CASCADE"), nullable=False),
    Column("spec", LargeBinary, nullable=False),
    PrimaryKeyConstraint("task_id"),
)
"""Specs of tasks. In a table of their own, because an update rewrites the whole row, and specs may be long."""

task_attempts = Table(
    "task_attempts",
    metadata,
    Column("task_id", String(MAX_ID_CHARS), ForeignKey("tasks.id", ondelete="CASCADE"), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("owner", String(MAX_ID_CHARS), nullable=False),
    Column("claimed_at", Double, nullable=False),
    Column("ended_at", Double, nullable=True),
    Column("reason", SmallInteger, nullable=False),
    Column("message", Text, nullable=False),
    Column("receipt", LargeBinary, nullable=False),
    PrimaryKeyConstraint("task_id", "attempt"),
)
"""Attempts of tasks."""

task_pieces = Table(
    "task_pieces",
    metadata,
    Column("task_id", String(MAX_ID_CHARS), ForeignKey("tasks.id", ondelete="CASCADE"), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("first_index", Integer, nullable=False),
    Column("event_count", Integer, nullable=False),
    Column("output", LargeBinary, nullable=False),
    PrimaryKeyConstraint("task_id", "attempt", "first_index"),
)
"""Answers of tasks, in chunks."""

files = Table(
    "files",
    metadata,
    Column("seq", _Number, nullable=False, autoincrement=True),
    Column("id", String(MAX_ID_CHARS), nullable=False),
    Column("tenant", String(MAX_TENANT_CHARS), nullable=False),
    Column("name", String(255), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("is_whole", Boolean, nullable=False),
    Column("media_type", String(MAX_MEDIA_TYPE_CHARS), nullable=False, server_default=text("''")),
    Column("task_id", String(MAX_ID_CHARS), nullable=False, server_default=text("''")),
    Column("attempt", Integer, nullable=False, server_default="0"),
    PrimaryKeyConstraint("seq"),
    UniqueConstraint("id"),
    Index("ix_files_tenant_seq", "tenant", "seq"),
    Index("ix_files_expires_at", "expires_at"),
    Index("ix_files_task_id", "task_id"),
    sqlite_autoincrement=True,
)
"""Files of batches and tasks; an incomplete one is being uploaded, or its upload failed. `task_id` is empty for those
of no task; `attempt` is 0 for the inputs of a task, else that which made the result."""

file_pieces = Table(
    "file_pieces",
    metadata,
    Column("file_id", String(MAX_ID_CHARS), ForeignKey("files.id", ondelete="CASCADE"), nullable=False),
    Column("place", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
    PrimaryKeyConstraint("file_id", "place"),
)
"""Contents of files, in chunks."""

batches = Table(
    "batches",
    metadata,
    Column("seq", _Number, nullable=False, autoincrement=True),
    Column("id", String(MAX_ID_CHARS), nullable=False),
    Column("tenant", String(MAX_TENANT_CHARS), nullable=False),
    Column("state", SmallInteger, nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("input_file", String(MAX_ID_CHARS), nullable=False),
    Column("output_file", String(MAX_ID_CHARS), nullable=False),
    Column("error_file", String(MAX_ID_CHARS), nullable=False),
    Column("metadata", LargeBinary, nullable=False),
    Column("errors", LargeBinary, nullable=False),
    Column("total_count", Integer, nullable=False),
    Column("completed_count", Integer, nullable=False),
    Column("failed_count", Integer, nullable=False),
    Column("cancelled_count", Integer, nullable=False),
    Column("expired_count", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("window_ends_at", Double, nullable=False),
    Column("cancelled_at", Double, nullable=True),
    Column("lines_ended_at", Double, nullable=True),
    Column("ended_at", Double, nullable=True),
    PrimaryKeyConstraint("seq"),
    UniqueConstraint("id"),
    Index("ix_batches_tenant_seq", "tenant", "seq"),
    Index("ix_batches_ended_at", "ended_at"),
    sqlite_autoincrement=True,
)
"""Batches of tasks. A batch in state 0 is being received and not visible; its tasks have state 0 too and do not start.
The counts are written when every item has ended; before that the tasks are counted."""

promises = Table(
    "promises",
    metadata,
    Column("id", Integer, nullable=False, autoincrement=False),
    Column("store_id", String(MAX_ID_CHARS), nullable=False),
    Column("commits", BigInteger, nullable=False),
    PrimaryKeyConstraint("id"),
)
"""One row: the id of this database, and the number of its acknowledged commits. See `store.promises`."""

_SUMS = (
    *("completed_count", "failed_count", "cancelled_count", "rejected_count", "unknown_count", "retried_count"),
    *("prompt_tokens", "cached_prompt_tokens", "completion_tokens", "unknown_tokens_count"),
    *("gpu_nanoseconds", "unknown_gpu_count", "remote_count", "remote_prompt_tokens", "remote_completion_tokens"),
)
_LATER_SUMS = (
    *("energy_millijoules", "measured_energy_count"),
    *("image_steps", "image_pixels", "audio_milliseconds"),
)
"""Sums that routers of an earlier release do not write."""

usage_hours = Table(
    "usage_hours",
    metadata,
    Column("hour", Integer, nullable=False),
    Column("tenant", String(MAX_TENANT_CHARS), nullable=False),
    Column("key", String(MAX_CALLER_CHARS), nullable=False),
    Column("model", String(MAX_MODEL_CHARS), nullable=False),
    Column("asked", String(MAX_MODEL_CHARS), nullable=False),
    *(Column(name, BigInteger, nullable=False) for name in _SUMS),
    *(Column(name, BigInteger, nullable=False, server_default="0") for name in _LATER_SUMS),
    PrimaryKeyConstraint("hour", "tenant", "key", "model", "asked"),
)
"""Usage by hour (UTC, hours since the epoch), tenant, key, model and name asked for; see `durable.usage`."""

usage_entries = Table(
    "usage_entries",
    metadata,
    Column("seq", _Number, nullable=False, autoincrement=True),
    Column("hour", Integer, nullable=False),
    Column("tenant", String(MAX_TENANT_CHARS), nullable=False),
    Column("key", String(MAX_CALLER_CHARS), nullable=False),
    Column("model", String(MAX_MODEL_CHARS), nullable=False),
    Column("asked", String(MAX_MODEL_CHARS), nullable=False),
    *(Column(name, BigInteger, nullable=False) for name in _SUMS),
    *(Column(name, BigInteger, nullable=False, server_default="0") for name in _LATER_SUMS),
    PrimaryKeyConstraint("seq"),
    sqlite_autoincrement=True,
)
"""Usage that is not in `usage_hours` yet: of each end of an attempt of a task, written in the same transaction. Only
inserted and deleted, so that routers which end tasks at the same time wait for none of its rows."""

# One row: the router that leads, or led last: see `weft.sql.owned_postgres`.
router_leader = Table(
    "router_leader",
    metadata,
    Column("id", Integer, autoincrement=False, nullable=False),
    Column("owner", String(64), nullable=False),
    Column("address", String(512), nullable=True),
    Column("backend_pid", Integer, nullable=True),
    Column("beat", BigInteger, nullable=True),
    Column("beat_at", DateTime(timezone=True), nullable=True),
    PrimaryKeyConstraint("id", name="pk_router_leader"),
)

request_records = Table(
    "request_records",
    metadata,
    Column("incarnation", String(MAX_ID_CHARS), nullable=False),
    Column("key", BigInteger, nullable=False),
    Column("router", String(MAX_ROUTER_CHARS), nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("request_id", String(MAX_ID_CHARS), nullable=False),
    Column("tenant", String(MAX_TENANT_CHARS), nullable=False),
    Column("client_id", String(MAX_ID_CHARS), nullable=False),
    Column("target", String(MAX_MODEL_CHARS), nullable=False),
    Column("asked_model", String(MAX_MODEL_CHARS), nullable=False),
    Column("priority", SmallInteger, nullable=False),
    Column("arrived_at", Double, nullable=False),
    Column("ended_at", Double, nullable=True),
    Column("reason", SmallInteger, nullable=False),
    Column("message", Text, nullable=False),
    Column("cancelled_by", Text, nullable=False),
    Column("decisions", LargeBinary, nullable=False),
    Column("receipt", LargeBinary, nullable=True),
    PrimaryKeyConstraint("incarnation", "key"),
    Index("ix_request_records_request_id", "request_id"),
    Index("ix_request_records_ended_at", "ended_at", "router", "number", "reason"),
    Index("ix_request_records_tenant", "tenant", "ended_at", "router", "number", "reason"),
    Index("ix_request_records_open", "incarnation", "router", info={_WHERE: "ended_at IS NULL"}),
)
"""Requests as routers remember them, without content. `incarnation` and `key` are those of the router that placed one;
`number` counts the ends at a router, over its restarts; it is 0 and `ended_at` null for one under way. Times are UTC
seconds since the epoch."""
event.listen(request_records, "before_create", _state_conditions)

router_beats = Table(
    "router_beats",
    metadata,
    Column("incarnation", String(MAX_ID_CHARS), nullable=False),
    Column("router", String(MAX_ROUTER_CHARS), nullable=False),
    Column("beat_at", Double, nullable=False),
    PrimaryKeyConstraint("incarnation"),
)
"""Routers that write to a shared database, and when each did so last, by the database's own clock."""

fair_accounts = Table(
    "fair_accounts",
    metadata,
    Column("router", String(MAX_ROUTER_CHARS), nullable=False),
    Column("tenant", String(MAX_TENANT_CHARS), nullable=False),
    Column("incarnation", String(MAX_ID_CHARS), nullable=False),
    Column("tokens", Double, nullable=False),
    Column("mean_cost", Double, nullable=True),
    Column("is_active", Boolean, nullable=False),
    Column("saved_at", Double, nullable=False),
    PrimaryKeyConstraint("router", "tenant"),
)
"""Accounts of fair share, in tokens by the tenant's weight; those of one incarnation can be compared."""

known_clients = Table(
    "known_clients",
    metadata,
    Column("router", String(MAX_ROUTER_CHARS), nullable=False),
    Column("tenant", String(MAX_TENANT_CHARS), nullable=False),
    Column("client_id", String(MAX_ID_CHARS), nullable=False),
    Column("last_seen_at", Double, nullable=False),
    Column("cooldown_seconds", Double, nullable=False),
    Column("record", LargeBinary, nullable=False),
    PrimaryKeyConstraint("router", "tenant", "client_id"),
)
"""Clients as a router knows them: a ClientRecord each, and the length of its last cooldown."""

figure_steps = Table(
    "figure_steps",
    metadata,
    Column("router", String(MAX_ROUTER_CHARS), nullable=False),
    Column("begins_at", Double, nullable=False),
    Column("seconds", Double, nullable=False),
    Column("step", LargeBinary, nullable=False),
    PrimaryKeyConstraint("router", "begins_at"),
)
"""Steps of a router's figures: a FigureStep each, without what has not changed since the one before."""


SCHEMA = Schema(
    owner="router",
    metadata=metadata,
    scripts=Path(__file__).parent / "migrations",
    newest="0012",
    version_table="router_alembic_version",
)
