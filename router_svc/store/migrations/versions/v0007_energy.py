"""The energy that accelerators used, where it was measured; of what was counted before, none was."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("usage_hours", "usage_entries"):
        for name in ("energy_millijoules", "measured_energy_count"):
            op.add_column(table, sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))
