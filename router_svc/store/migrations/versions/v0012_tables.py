"""The first revision. New databases get all tables at once, see `weft.sql.schema`; no older database is supported."""

revision = "0012"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Does nothing: no database is older."""
