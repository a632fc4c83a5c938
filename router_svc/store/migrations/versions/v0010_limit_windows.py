"""Ledgers of limits that routers share, the routers that share them, and what tenants were served by each."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "limit_windows",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("key", sa.String(128), nullable=False),
        sa.Column("model", sa.String(320), nullable=False),
        sa.Column("client", sa.String(128), nullable=False),
        sa.Column("unit", sa.SmallInteger, nullable=False),
        sa.Column("seconds", sa.Integer, nullable=False),
        sa.Column("most", sa.BigInteger, nullable=False),
        sa.Column("total", sa.BigInteger, nullable=False),
        sa.Column("changed_at", sa.Double, nullable=False),
        sa.Column("counted", sa.JSON, nullable=False),
        sa.Column("leases", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_limit_windows"),
    )
    op.create_index("ix_limit_windows_tenant", "limit_windows", ["tenant"])
    op.create_index("ix_limit_windows_changed_at", "limit_windows", ["changed_at"])
    op.create_table(
        "limit_routers",
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("contact_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_limit_routers"),
    )
    op.create_table(
        "tenant_service",
        sa.Column("router", sa.String(128), nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("tokens", sa.Double, nullable=False),
        sa.Column("changed_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("router", "tenant", name="pk_tenant_service"),
    )
    op.create_index("ix_tenant_service_changed_at", "tenant_service", ["changed_at"])
