"""Usage by hour, and the usage of ended attempts of tasks that is not in it yet."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_SUMS = (
    *("completed_count", "failed_count", "cancelled_count", "rejected_count", "unknown_count", "retried_count"),
    *("prompt_tokens", "cached_prompt_tokens", "completion_tokens", "unknown_tokens_count"),
    *("gpu_nanoseconds", "unknown_gpu_count", "remote_count", "remote_prompt_tokens", "remote_completion_tokens"),
)


def _row() -> list[sa.Column]:
    return [
        sa.Column("hour", sa.Integer, nullable=False),
        sa.Column("tenant", sa.String(128), nullable=False),
        sa.Column("key", sa.String(128), nullable=False),
        sa.Column("model", sa.String(320), nullable=False),
        sa.Column("asked", sa.String(320), nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in _SUMS),
    ]


def upgrade() -> None:
    names = ("hour", "tenant", "key", "model", "asked")
    op.create_table("usage_hours", *_row(), sa.PrimaryKeyConstraint(*names, name="pk_usage_hours"))
    number = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.create_table(
        "usage_entries",
        sa.Column("seq", number, autoincrement=True, nullable=False),
        *_row(),
        sa.PrimaryKeyConstraint("seq", name="pk_usage_entries"),
        sqlite_autoincrement=True,
    )
