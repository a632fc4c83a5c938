"""Which requests are durable tasks by setting: of a model, and of the whole mesh."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("models", "declared_models", "mesh_settings"):
        op.add_column(table, sa.Column("journal", sa.String(16), nullable=True))
