"""The work on images and recordings; what was counted before has none."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("usage_hours", "usage_entries"):
        for name in ("image_steps", "image_pixels", "audio_milliseconds"):
            op.add_column(table, sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))
