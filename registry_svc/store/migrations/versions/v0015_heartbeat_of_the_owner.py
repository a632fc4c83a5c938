"""The heartbeat of the registry that owns the database."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("ownership", sa.Column("address", sa.String(512), nullable=True))
    op.add_column("ownership", sa.Column("backend_pid", sa.Integer, nullable=True))
    op.add_column("ownership", sa.Column("beat", sa.BigInteger, nullable=True))
    op.add_column("ownership", sa.Column("beat_at", sa.DateTime(timezone=True), nullable=True))
