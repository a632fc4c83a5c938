"""Leases say how long they are, and the database how much has been promised with it."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tasks", sa.Column("lease_seconds", sa.Double, nullable=True))
    op.create_table(
        "promises",
        sa.Column("id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("store_id", sa.String(128), nullable=False),
        sa.Column("commits", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_promises"),
    )
