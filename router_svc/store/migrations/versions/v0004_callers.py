"""Who submitted a task, for which request and end user, and with which metadata."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tasks", sa.Column("request_id", sa.String(128), nullable=True))
    op.add_column("tasks", sa.Column("labels", sa.LargeBinary, nullable=True))
    condition = sa.text("request_id IS NOT NULL")
    op.create_index("ix_tasks_request", "tasks", ["request_id"], sqlite_where=condition, postgresql_where=condition)
