"""Media types of files, and the tasks whose inputs and results they are."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("files", sa.Column("media_type", sa.String(128), nullable=False, server_default=sa.text("''")))
    op.add_column("files", sa.Column("task_id", sa.String(128), nullable=False, server_default=sa.text("''")))
    op.add_column("files", sa.Column("attempt", sa.Integer, nullable=False, server_default="0"))
    op.create_index("ix_files_task_id", "files", ["task_id"])
