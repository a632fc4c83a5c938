"""Translates statements with named parameters for SQLite and PostgreSQL.

`:name` is a value, and `IN :names` (or `NOT IN :names`) a list of texts or numbers, which may be empty.
"""

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

MAX_CACHED = 1024
_IN_LIST = re.compile(r"\b(NOT\s+)?IN\s+:(\w+)", re.IGNORECASE)
_VALUE = re.compile(r"('[^']*'|::)|(?<!:):([a-z_]\w*)|%")

Values = Mapping[str, Any]


@lru_cache(MAX_CACHED)
def sqlite_text(statement: str) -> str:
    """Returns a statement for sqlite3, with lists as JSON texts."""
    return _IN_LIST.sub(lambda found: f"{found[1] or ''}IN (SELECT value FROM json_each(:{found[2]}))", statement)  # noqa: S608 - of a statement


@lru_cache(MAX_CACHED)
def postgres_text(statement: str) -> str:
    """Returns a statement for psycopg."""

    def placeholder(found: re.Match[str]) -> str:
        if found[2]:
            return f"%({found[2]})s"
        return found[0].replace("%", "%%")

    listed = _IN_LIST.sub(lambda found: f"<> ALL(:{found[2]})" if found[1] else f"= ANY(:{found[2]})", statement)
    return _VALUE.sub(placeholder, listed)


def sqlite_values(values: Values) -> Values:
    """Returns values for sqlite3: datetimes as UTC texts, lists as JSON."""
    return {name: _SQLITE[type(value)](value) if type(value) in _SQLITE else value for name, value in values.items()}


def _moment_text(moment: datetime) -> str:
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "microseconds")


_SQLITE: Mapping[type, Any] = {datetime: _moment_text, list: json.dumps, tuple: json.dumps}


def moment_from(text: bytes) -> datetime:
    """Parses a datetime of SQLite."""
    return datetime.fromisoformat(text.decode()).replace(tzinfo=UTC)


@lru_cache(MAX_CACHED)
def insert(table: str, *columns: str) -> str:
    """Returns the statement that inserts a row, with parameters named like the columns."""
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join(f':{each}' for each in columns)})"  # noqa: S608 - names in the code


@lru_cache(MAX_CACHED)
def upsert(table: str, key: str | tuple[str, ...], *columns: str) -> str:
    """Returns the statement that inserts a row, or updates `columns` of the row with the same key."""
    keys = (key,) if isinstance(key, str) else key
    changed = ", ".join(f"{each} = excluded.{each}" for each in columns)
    return f"{insert(table, *keys, *columns)} ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {changed}"


@lru_cache(MAX_CACHED)
def update(table: str, key: str, *columns: str) -> str:
    """Returns the statement that updates `columns` of the row with a key."""
    return f"UPDATE {table} SET {', '.join(f'{each} = :{each}' for each in columns)} WHERE {key} = :{key}"  # noqa: S608


@lru_cache(MAX_CACHED)
def delete(table: str, key: str) -> str:
    """Returns the statement that deletes rows with keys in the list `given`."""
    return f"DELETE FROM {table} WHERE {key} IN :given"  # noqa: S608
