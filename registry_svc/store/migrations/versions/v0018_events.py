"""Events."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "events",
        sa.Column("sequence", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("event", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("sequence", name="pk_events"),
    )
