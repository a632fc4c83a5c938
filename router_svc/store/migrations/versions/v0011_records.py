"""Requests, accounts of fair share, clients and figures of routers, which outlive a restart."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def _requests() -> None:
    op.create_table(
        "request_records",
        sa.Column("incarnation", sa.String(128), nullable=False),
        sa.Column("key", sa.BigInteger, nullable=False),
        sa.Column("router", sa.String(128), nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("request_id", sa.String(128), nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("client_id", sa.String(128), nullable=False),
        sa.Column("target", sa.String(320), nullable=False),
        sa.Column("asked_model", sa.String(320), nullable=False),
        sa.Column("priority", sa.SmallInteger, nullable=False),
        sa.Column("arrived_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double, nullable=True),
        sa.Column("reason", sa.SmallInteger, nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("cancelled_by", sa.Text, nullable=False),
        sa.Column("decisions", sa.LargeBinary, nullable=False),
        sa.Column("receipt", sa.LargeBinary, nullable=True),
        sa.PrimaryKeyConstraint("incarnation", "key", name="pk_request_records"),
    )
    table, under_way = "request_records", sa.text("ended_at IS NULL")
    op.create_index("ix_request_records_request_id", table, ["request_id"])
    op.create_index("ix_request_records_ended_at", table, ["ended_at", "router", "number", "reason"])
    op.create_index("ix_request_records_tenant", table, ["tenant", "ended_at", "router", "number", "reason"])
    op.create_index(
        "ix_request_records_open",
        table,
        ["incarnation", "router"],
        sqlite_where=under_way,
        postgresql_where=under_way,
    )


def _beats() -> None:
    op.create_table(
        "router_beats",
        sa.Column("incarnation", sa.String(128), nullable=False),
        sa.Column("router", sa.String(128), nullable=False),
        sa.Column("beat_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("incarnation", name="pk_router_beats"),
    )


def _accounts() -> None:
    op.create_table(
        "fair_accounts",
        sa.Column("router", sa.String(128), nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("incarnation", sa.String(128), nullable=False),
        sa.Column("tokens", sa.Double, nullable=False),
        sa.Column("mean_cost", sa.Double, nullable=True),
        sa.Column("is_active", sa.Boolean, nullable=False),
        sa.Column("saved_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("router", "tenant", name="pk_fair_accounts"),
    )


def _clients() -> None:
    op.create_table(
        "known_clients",
        sa.Column("router", sa.String(128), nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("client_id", sa.String(128), nullable=False),
        sa.Column("last_seen_at", sa.Double, nullable=False),
        sa.Column("cooldown_seconds", sa.Double, nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("router", "tenant", "client_id", name="pk_known_clients"),
    )


def _figures() -> None:
    op.create_table(
        "figure_steps",
        sa.Column("router", sa.String(128), nullable=False),
        sa.Column("begins_at", sa.Double, nullable=False),
        sa.Column("seconds", sa.Double, nullable=False),
        sa.Column("step", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("router", "begins_at", name="pk_figure_steps"),
    )


def upgrade() -> None:
    _requests()
    _beats()
    _accounts()
    _clients()
    _figures()
