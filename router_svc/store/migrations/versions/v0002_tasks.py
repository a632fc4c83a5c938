"""Durable tasks, files and batches."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    _create_batches()
    _create_files()
    _create_tasks()
    _create_task_indexes()
    _create_file_pieces()
    _create_task_attempts()
    _create_task_requests()
    _create_task_pieces()


def _create_batches() -> None:
    op.create_table(
        "batches",
        sa.Column("seq", _NUMBER, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("state", sa.SmallInteger, nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("input_file", sa.String(128), nullable=False),
        sa.Column("output_file", sa.String(128), nullable=False),
        sa.Column("error_file", sa.String(128), nullable=False),
        sa.Column("metadata", sa.LargeBinary, nullable=False),
        sa.Column("errors", sa.LargeBinary, nullable=False),
        sa.Column("total_count", sa.Integer, nullable=False),
        sa.Column("completed_count", sa.Integer, nullable=False),
        sa.Column("failed_count", sa.Integer, nullable=False),
        sa.Column("cancelled_count", sa.Integer, nullable=False),
        sa.Column("expired_count", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("window_ends_at", sa.Double, nullable=False),
        sa.Column("cancelled_at", sa.Double, nullable=True),
        sa.Column("lines_ended_at", sa.Double, nullable=True),
        sa.Column("ended_at", sa.Double, nullable=True),
        sa.PrimaryKeyConstraint("seq", name="pk_batches"),
        sa.UniqueConstraint("id", name="uq_batches_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_batches_ended_at", "batches", ["ended_at"])
    op.create_index("ix_batches_tenant_seq", "batches", ["tenant", "seq"])


def _create_files() -> None:
    op.create_table(
        "files",
        sa.Column("seq", _NUMBER, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.Column("is_whole", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_files"),
        sa.UniqueConstraint("id", name="uq_files_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_files_expires_at", "files", ["expires_at"])
    op.create_index("ix_files_tenant_seq", "files", ["tenant", "seq"])


def _create_tasks() -> None:
    op.create_table(
        "tasks",
        sa.Column("seq", _NUMBER, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("idempotency_key", sa.String(255), nullable=True),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("state", sa.SmallInteger, nullable=False),
        sa.Column("model", sa.String(320), nullable=False),
        sa.Column("band", sa.SmallInteger, nullable=False),
        sa.Column("batch_id", sa.String(128), nullable=False),
        sa.Column("line", sa.Integer, nullable=False),
        sa.Column("custom_id", sa.Text, nullable=False),
        sa.Column("origin_kind", sa.String(64), nullable=False),
        sa.Column("caller", sa.String(128), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("max_attempts", sa.Integer, nullable=False),
        sa.Column("owner", sa.String(128), nullable=False),
        sa.Column("lease_until", sa.Double, nullable=True),
        sa.Column("pending_limit_seconds", sa.Double, nullable=False),
        sa.Column("window_ends_at", sa.Double, nullable=True),
        sa.Column("ready_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("started_at", sa.Double, nullable=True),
        sa.Column("ended_at", sa.Double, nullable=True),
        sa.Column("last_index", sa.Integer, nullable=False),
        sa.Column("result_size", sa.BigInteger, nullable=False),
        sa.Column("error_reason", sa.SmallInteger, nullable=False),
        sa.Column("error_message", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_tasks"),
        sa.UniqueConstraint("id", name="uq_tasks_id"),
        sqlite_autoincrement=True,
    )


def _create_task_indexes() -> None:
    op.create_index("ix_tasks_batch", "tasks", ["batch_id", "line"])
    _create_partial_index("ix_tasks_ended", ["ended_at"], "state > 2")
    _create_partial_index("ix_tasks_expiry", ["expires_at"], "state = 1")
    op.create_index("ix_tasks_key", "tasks", ["tenant", "idempotency_key"], unique=True)
    _create_partial_index("ix_tasks_lane", ["model", "tenant", "band", "seq"], "state = 1")
    _create_partial_index("ix_tasks_lease", ["lease_until"], "state = 2")
    _create_partial_index("ix_tasks_ready", ["ready_at"], "state = 1")
    op.create_index("ix_tasks_tenant_seq", "tasks", ["tenant", "seq"])


def _create_file_pieces() -> None:
    op.create_table(
        "file_pieces",
        sa.Column("file_id", sa.String(128), nullable=False),
        sa.Column("place", sa.Integer, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.ForeignKeyConstraint(["file_id"], ["files.id"], name="fk_file_pieces_file_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("file_id", "place", name="pk_file_pieces"),
    )


def _create_task_attempts() -> None:
    op.create_table(
        "task_attempts",
        sa.Column("task_id", sa.String(128), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("owner", sa.String(128), nullable=False),
        sa.Column("claimed_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double, nullable=True),
        sa.Column("reason", sa.SmallInteger, nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("receipt", sa.LargeBinary, nullable=False),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name="fk_task_attempts_task_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("task_id", "attempt", name="pk_task_attempts"),
    )


def _create_task_requests() -> None:
    op.create_table(
        "task_specs",
        sa.Column("task_id", sa.String(128), nullable=False),
        sa.Column("spec", sa.LargeBinary, nullable=False),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name="fk_task_specs_task_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("task_id", name="pk_task_specs"),
    )


def _create_task_pieces() -> None:
    op.create_table(
        "task_pieces",
        sa.Column("task_id", sa.String(128), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("first_index", sa.Integer, nullable=False),
        sa.Column("event_count", sa.Integer, nullable=False),
        sa.Column("output", sa.LargeBinary, nullable=False),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name="fk_task_pieces_task_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("task_id", "attempt", "first_index", name="pk_task_pieces"),
    )


def _create_partial_index(name: str, columns: list[str], where: str) -> None:
    condition = sa.text(where)
    op.create_index(name, "tasks", columns, sqlite_where=condition, postgresql_where=condition)
