"""API keys, and which pepper their digests were made with."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("description", sa.Text, nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("scopes", sa.Text, nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("previous_digest", sa.LargeBinary, nullable=False),
        sa.Column("previous_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("rotated_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
    )
    op.create_table(
        "key_pepper",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("mark", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_key_pepper"),
    )
