"""Agents, wake plans, declarations, join tokens, dial-out runners, and who owns the database.

Rows of the first schema stay: their runners do not dial out and their models never sleep.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runners", sa.Column("dial_out", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("models", sa.Column("wake", sa.Text, nullable=True))
    op.create_table(
        "agents",
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("target", sa.String(128), nullable=False),
        sa.Column("targets_pool", sa.Boolean, nullable=False),
        sa.Column("description", sa.Text, nullable=False),
        sa.Column("system_prompt", sa.Text, nullable=False),
        sa.Column("default_params", sa.Text, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("runner", sa.String(128), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_agents"),
        sa.ForeignKeyConstraint(["runner"], ["runners.name"], name="fk_agents_runner", ondelete="CASCADE"),
    )
    op.create_index("ix_agents_runner", "agents", ["runner"])
    op.create_table(
        "declared_models",
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("pool_name", sa.String(128), nullable=False),
        sa.Column("operations", sa.String(64), nullable=False),
        sa.Column("context_tokens", sa.Integer, nullable=False),
        sa.Column("digest", sa.String(128), nullable=False),
        sa.Column("remote", sa.Boolean, nullable=False),
        sa.Column("wake", sa.Text, nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("runner", sa.String(128), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_declared_models"),
    )
    op.create_table(
        "declared_agents",
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("target", sa.String(128), nullable=False),
        sa.Column("targets_pool", sa.Boolean, nullable=False),
        sa.Column("description", sa.Text, nullable=False),
        sa.Column("system_prompt", sa.Text, nullable=False),
        sa.Column("default_params", sa.Text, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_declared_agents"),
    )
    op.create_table(
        "join_tokens",
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("description", sa.Text, nullable=False),
        sa.Column("secret_sha256", sa.String(64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_join_tokens"),
    )
    op.create_table(
        "ownership",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_ownership"),
    )
