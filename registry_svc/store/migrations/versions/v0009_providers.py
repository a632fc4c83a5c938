"""Providers of central models."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("declared_models", sa.Column("provider", sa.LargeBinary, nullable=True))
