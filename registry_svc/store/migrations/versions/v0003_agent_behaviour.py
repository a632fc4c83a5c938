"""What agents ask the mesh for. Agents of the second schema ask for nothing."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("agents", sa.Column("behaviour", sa.Text, nullable=True))
    op.add_column("declared_agents", sa.Column("behaviour", sa.Text, nullable=True))
