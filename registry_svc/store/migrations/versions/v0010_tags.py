"""Tier, labels and owner of models and agents, and what a model is outside the mesh.

What is there already has none of them.
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("models", "declared_models", "agents", "declared_agents"):
        op.add_column(table, sa.Column("tags", sa.LargeBinary, nullable=True))
    for table in ("models", "declared_models"):
        op.add_column(table, sa.Column("upstream", sa.Text, nullable=True))
