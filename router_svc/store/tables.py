"""The tables of a router."""

from sqlalchemy import Column, DateTime, Index, Integer, LargeBinary, MetaData, PrimaryKeyConstraint, String, Table

MAX_ID_CHARS = 128
MAX_TENANT_CHARS = 128

metadata = MetaData(naming_convention={"pk": "pk_%(table_name)s", "ix": "ix_%(table_name)s_%(column_0_name)s"})

responses = Table(
    "responses",
    metadata,
    Column("id", String(MAX_ID_CHARS), nullable=False),
    Column("tenant", String(MAX_TENANT_CHARS), nullable=False),
    Column("previous_id", String(MAX_ID_CHARS), nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("size", Integer, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("items", LargeBinary, nullable=False),
    PrimaryKeyConstraint("id"),
    Index(None, "tenant"),
    Index(None, "created_at"),
)
"""Answers that callers may come back to. `size` is the bytes of `body` and `items`."""
