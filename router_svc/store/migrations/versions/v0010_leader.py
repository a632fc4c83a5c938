"""The router that leads, with its heartbeats."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "router_leader",
        sa.Column("id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("address", sa.String(512), nullable=True),
        sa.Column("backend_pid", sa.Integer, nullable=True),
        sa.Column("beat", sa.BigInteger, nullable=True),
        sa.Column("beat_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_router_leader"),
    )
