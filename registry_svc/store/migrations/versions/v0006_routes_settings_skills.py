"""Routes, what operators set for the whole mesh, and what models can do beyond text.

Models of the earlier schema have no known skills. The settings get their row when the registry starts.
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("models", "declared_models"):
        op.add_column(table, sa.Column("skills", sa.String(64), nullable=True))
    op.create_table(
        "declared_routes",
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("description", sa.Text, nullable=False),
        sa.Column("candidates", sa.Text, nullable=False),
        sa.Column("budget_seconds", sa.Float, nullable=True),
        sa.Column("keep_alive_seconds", sa.Float, nullable=True),
        sa.Column("pin_primary", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_declared_routes"),
    )
    op.create_table(
        "mesh_settings",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("allow_cloud_fallback", sa.Boolean, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_mesh_settings"),
    )
