"""Sizes of the requests of tasks, by which finished tasks are kept in their bounds."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tasks", sa.Column("request_size", sa.BigInteger, nullable=False, server_default="0"))
    op.execute(
        "UPDATE tasks SET request_size = "
        "coalesce((SELECT length(task_specs.spec) FROM task_specs WHERE task_specs.task_id = tasks.id), 0)"
    )
    condition = sa.text("state > 2")
    op.create_index(
        "ix_tasks_kept",
        "tasks",
        ["tenant", "ended_at"],
        sqlite_where=condition,
        postgresql_where=condition,
    )
