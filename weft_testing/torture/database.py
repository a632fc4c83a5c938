"""What is kept, read past the router: with the database's own driver, and by the names of tables and columns only."""

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from weft_testing.torture.history import AttemptRow, KeptTask

SQLITE_PREFIX = "sqlite+aiosqlite:///"
_POSTGRES_PREFIX = "postgresql+asyncpg://"
_TASKS = "SELECT id, state, attempt, idempotency_key FROM tasks"
_ATTEMPTS = "SELECT task_id, attempt, owner, claimed_at, ended_at, reason FROM task_attempts ORDER BY task_id, attempt"


async def read_database(url: str) -> tuple[Mapping[str, KeptTask], Sequence[str]]:
    """Every task by its id, and what the database says is wrong with itself.

    Raises sqlite3.Error, or what asyncpg raises.
    """
    if url.startswith(SQLITE_PREFIX):
        return _read_sqlite(Path(url.removeprefix(SQLITE_PREFIX)))
    return await _read_postgres(url.replace(_POSTGRES_PREFIX, "postgresql://", 1))


def _read_sqlite(path: Path) -> tuple[Mapping[str, KeptTask], Sequence[str]]:
    with closing(sqlite3.connect(path)) as connection:
        damage = [line for (line,) in connection.execute("PRAGMA integrity_check") if line != "ok"]
        dangling = connection.execute("PRAGMA foreign_key_check").fetchall()
        damage += [f"a row of {row[0]} belongs to nobody" for row in dangling]
        return _kept(connection.execute(_TASKS), connection.execute(_ATTEMPTS)), damage


async def _read_postgres(dsn: str) -> tuple[Mapping[str, KeptTask], Sequence[str]]:
    import asyncpg  # noqa: PLC0415 - only who has such a database has the driver

    connection = await asyncpg.connect(dsn)
    try:
        # PostgreSQL has no check of its own that an ordinary user may run.
        return _kept(await connection.fetch(_TASKS), await connection.fetch(_ATTEMPTS)), ()
    finally:
        await connection.close()


def _kept(tasks: Iterable[Any], attempts: Iterable[Any]) -> Mapping[str, KeptTask]:
    rows: dict[str, list[AttemptRow]] = defaultdict(list)
    for task, attempt, owner, claimed_at, ended_at, reason in attempts:
        rows[task].append(
            AttemptRow(attempt=attempt, owner=owner, claimed_at=claimed_at, ended_at=ended_at, reason=reason)
        )
    return {
        task: KeptTask(id=task, state=state, attempt=attempt, key=key or "", attempts=rows[task])
        for task, state, attempt, key in tasks
    }
