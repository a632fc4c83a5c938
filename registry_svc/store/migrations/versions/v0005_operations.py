"""Operations, their audit log, spent nonces, and the marks of governance."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "operations",
        sa.Column("number", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("request_id", sa.String(128), nullable=False),
        sa.Column("action", sa.LargeBinary, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("requested_by", sa.Text, nullable=False),
        sa.Column("signers", sa.Text, nullable=False),
        sa.Column("runner", sa.String(128), nullable=False),
        sa.Column("reason", sa.String(64), nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("result", sa.LargeBinary, nullable=False),
        sa.Column("cancel_requested", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("number", name="pk_operations"),
        sa.UniqueConstraint("id", name="uq_operations_id"),
        sa.UniqueConstraint("request_id", name="uq_operations_request_id"),
    )
    op.create_index("ix_operations_ended_at", "operations", ["ended_at"])
    op.create_table(
        "audit_entries",
        sa.Column("sequence", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("event", sa.String(64), nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("operation", sa.String(160), nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("previous_hash", sa.String(64), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("sequence", name="pk_audit_entries"),
    )
    op.create_table(
        "used_nonces",
        sa.Column("nonce", sa.String(128), nullable=False),
        sa.Column("operation_id", sa.String(128), nullable=False),
        sa.Column("kept_until", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("nonce", name="pk_used_nonces"),
    )
    op.create_index("ix_used_nonces_kept_until", "used_nonces", ["kept_until"])
    op.create_table(
        "governance_marks",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("audience", sa.String(128), nullable=False),
        sa.Column("newest_issued_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_governance_marks"),
    )
