"""Sessions, runners and models.

Written out rather than taken from `tables.py`: a migration is history and must not change with the code.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("request_id", sa.String(128), nullable=False),
        sa.Column("ticket_key", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_sessions"),
    )
    op.create_table(
        "runners",
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("session_id", sa.String(128), nullable=False),
        sa.Column("incarnation", sa.String(128), nullable=False),
        sa.Column("address", sa.String(512), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("runtime", sa.String(128), nullable=False),
        sa.Column("version", sa.String(128), nullable=False),
        sa.Column("standing", sa.String(16), nullable=False),
        sa.Column("last_heartbeat_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("inactive_since", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("name", name="pk_runners"),
        sa.UniqueConstraint("session_id", name="uq_runners_session_id"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name="fk_runners_session_id", ondelete="CASCADE"),
    )
    op.create_table(
        "models",
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("runner", sa.String(128), nullable=False),
        sa.Column("pool_name", sa.String(128), nullable=False),
        sa.Column("operations", sa.String(64), nullable=False),
        sa.Column("context_tokens", sa.Integer, nullable=False),
        sa.Column("digest", sa.String(128), nullable=False),
        sa.Column("remote", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_models"),
        sa.ForeignKeyConstraint(["runner"], ["runners.name"], name="fk_models_runner", ondelete="CASCADE"),
    )
    op.create_index("ix_models_runner", "models", ["runner"])
