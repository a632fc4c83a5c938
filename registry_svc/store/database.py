"""The kinds of database there are, and what each must bring: ownership, tuning, and words for its failures."""

from typing import Protocol

from sqlalchemy import URL, Connection, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from registry_svc.store.postgres import PostgresDatabase
from registry_svc.store.sqlite import SqliteDatabase
from weft.kernel.errors import invalid_field


class Database(Protocol):
    """One database, with one registry on it at a time."""

    url: URL
    driver_errors: tuple[type[Exception], ...]
    """What the driver raises past SQLAlchemy when the database fails."""

    def take(self) -> AsyncEngine:
        """Take ownership at the latest with the engine's first connection; raises ALREADY_EXISTS when it is taken."""
        ...

    def require_whole(self, connection: Connection) -> None:
        """Raise what `weft.sql.opening` has words for when the database is damaged, as far as that is looked at."""
        ...

    async def mark(self, connection: AsyncConnection) -> None:
        """Leave word of the new owner in the schema, once that is up to date, within `connection`'s transaction."""
        ...

    async def release(self) -> None:
        """Close the engine and give ownership up. Safe to call twice, or when never taken."""
        ...

    def explain(self, error: Exception) -> str:
        """What the log may say of a failure: nothing that was written, and no password."""
        ...


def database_of(database_url: str) -> Database:
    """The database behind a URL; raises INVALID_ARGUMENT when it is of no kind that is supported."""
    match _parsed(database_url):
        case URL(drivername="sqlite+aiosqlite") as url:
            return SqliteDatabase(url)
        case URL(drivername="postgresql+asyncpg") as url:
            return PostgresDatabase(url)
    raise invalid_field("database_url", "must begin with sqlite+aiosqlite:// or postgresql+asyncpg://")


def _parsed(database_url: str) -> URL:
    # Not chained: the causes quote the URL or parts of it, and in it may be a password.
    try:
        return make_url(database_url)
    except (ArgumentError, ValueError):
        raise invalid_field("database_url", "must be a URL such as postgresql+asyncpg://user@host/weft") from None
