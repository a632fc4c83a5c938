"""Database addresses: SQLite files, and PostgreSQL URLs in libpq's form."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from weft.kernel.errors.error_tree import invalid_field

_SCHEME = re.compile(r"(sqlite|postgresql)(?:\+\w+)?://")
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(?::\d*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseAddress:
    """The address of a database."""

    path: Path | None = None
    """The SQLite file; None: SQLite in memory, or PostgreSQL."""
    url: str = field(default="", repr=False)
    """The PostgreSQL URL, which may contain a password; empty: SQLite."""
    location: str
    """The file, or host and database, for messages."""
    shown: str
    """The URL without password and parameters, for the log."""

    @property
    def is_sqlite(self) -> bool:
        """Whether it is SQLite, which only processes of one machine can open."""
        return not self.url


def address_of(database: str | Path) -> DatabaseAddress:
    """Parses a URL, or the path of a SQLite file. Raises INVALID_ARGUMENT, without quoting the URL.

    A driver in the scheme, as in `postgresql+asyncpg://`, is ignored.
    """
    if isinstance(database, Path):
        return _file_address(str(database))
    found = _SCHEME.match(database)
    if found is None:
        raise invalid_field("database_url", "must begin with sqlite:// or postgresql://")
    rest = database[found.end() :]
    if found[1] == "sqlite":
        host, _, path = rest.partition("?")[0].partition("/")
        if host:
            raise invalid_field("database_url", "must have three slashes before a relative path: sqlite:///weft.db")
        return _file_address(path)
    # asyncpg calls the parameter `ssl`.
    url = f"postgresql://{re.sub('(?<=[?&])ssl=', 'sslmode=', rest)}"
    # Errors do not quote the URL, which may contain a password.
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("postgresql://:wrong")
    user, at, hosts = parts.netloc.rpartition("@")
    # Several ones, of which libpq finds the primary.
    matches = [_HOST.fullmatch(host) for host in hosts.split(",")]
    if not all(matches):
        raise invalid_field("database_url", "must be a URL such as postgresql://user@host/weft")
    name, colon, _ = user.partition(":")
    location = ",".join(host[1] for host in matches if host is not None)
    return DatabaseAddress(
        url=url,
        location=f"{location or 'localhost'}{parts.path or '/'}",
        shown=f"postgresql://{name}{colon and ':***'}{at}{hosts}{parts.path}",
    )


def _file_address(name: str) -> DatabaseAddress:
    if name.startswith("file:"):
        raise invalid_field("database_url", "SQLite's file: form is not supported, name the file by its path")
    path = None if name in {"", ":memory:"} else Path(name)
    return DatabaseAddress(path=path, location=str(path or "in memory"), shown=f"sqlite:///{name}")
