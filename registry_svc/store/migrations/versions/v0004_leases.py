"""The VRAM ledger."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "leases",
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("fencing_number", sa.BigInteger, nullable=False),
        sa.Column("request_id", sa.String(128), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("holder_kind", sa.Integer, nullable=False),
        sa.Column("holder_name", sa.String(128), nullable=False),
        sa.Column("holder_incarnation", sa.String(128), nullable=False),
        sa.Column("purpose", sa.String(256), nullable=False),
        sa.Column("shares", sa.Text, nullable=False),
        sa.Column("processes", sa.Text, nullable=False),
        sa.Column("pinned", sa.Boolean, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("releasing", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_leases"),
        sa.UniqueConstraint("fencing_number", name="uq_leases_fencing_number"),
    )
    op.create_table(
        "lease_counter",
        sa.Column("id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("last_fencing_number", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_lease_counter"),
    )
