"""The connection of a store, and its transactions. All of it runs in the store's thread."""

import os
import sqlite3
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Protocol

from weft.kernel.file_lock import lock_file
from weft.sql.address import DatabaseAddress
from weft.sql.failures import DatabaseError
from weft.sql.owners import OwnerRole
from weft.sql.statements import Values, insert, moment_from, sqlite_text, sqlite_values, update

MAX_CHECKED_BYTES = 256 * 1024 * 1024
"""A larger file is opened without the check of its structure, which reads all of it."""
BUSY_TIMEOUT_MS = 5_000
"""Longest wait for a lock that another program holds."""
LOCK_TRY_MS = 10
"""How long one try to begin a write waits for it; what only reads runs between two tries."""
_PRAGMAS = (
    "journal_mode=WAL",
    "synchronous=FULL",
    "foreign_keys=ON",
    # Deleted rows are overwritten in the file: they may hold secrets.
    "secure_delete=ON",
)

Row = Any
"""A named tuple: columns are attributes."""


class Connection(Protocol):
    """A connection to a database of one kind. Methods raise DatabaseError."""

    dialect: str
    """`sqlite` or `postgresql`."""
    owner: str | None
    """The id that this process wrote into the role's table; None until then, and on SQLite."""

    def open(self) -> None:
        """Connects. Raises OSError for a file, ALREADY_EXISTS when another process owns the database."""
        ...

    def begin(self, *, writes: bool) -> None:
        """Begins a transaction; connects again if the connection broke."""
        ...

    def commit(self) -> None:
        """Commits; what was written is on disk afterwards."""
        ...

    def rollback(self) -> None:
        """Undoes the transaction, if there is one."""
        ...

    def execute(self, sql: str, values: Values) -> Any:
        """Runs a statement with `:name` parameters; returns the driver's cursor."""
        ...

    def execute_many(self, sql: str, rows: Sequence[Values]) -> None:
        """Runs a statement once per row."""
        ...

    def fetch(self, cursor: Any) -> list[tuple[Any, ...]]:
        """Returns the rows that are left."""
        ...

    @property
    def is_in_transaction(self) -> bool:
        """Whether a transaction goes on: some failures end it."""
        ...

    @property
    def changes(self) -> int:
        """Rows that this connection has changed so far; PostgreSQL does not count: 0."""
        ...

    def mark_owner(self, tx: "Tx") -> None:
        """Records the new owner, in the transaction that opens the database."""
        ...

    def beat(self, tx: "Tx") -> bool:
        """Writes a heartbeat of the owner; returns whether a standby is connected."""
        ...

    def interrupt(self) -> None:
        """Ends the statement in progress. Called from another thread."""
        ...

    def close(self) -> None:
        """Gives ownership up and disconnects. Safe to call twice, or when not connected."""
        ...


class Tx:
    """A transaction. Statements have `:name` parameters, given by keyword: `tx.row("… WHERE id = :id", id=name)`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.dialect = connection.dialect
        """`sqlite` or `postgresql`, for the few statements that differ."""

    def execute(self, sql: str, /, **values: Any) -> int:
        """Runs a statement; returns how many rows it changed."""
        return int(self._connection.execute(sql, values).rowcount)

    def many(self, sql: str, rows: Iterable[Values], /) -> None:
        """Runs a statement once per row of values; does nothing without rows."""
        given = list(rows)
        if given:
            self._connection.execute_many(sql, given)

    def insert(self, table: str, *rows: Values) -> None:
        """Inserts rows, each of which has the same columns."""
        if rows:
            self.many(insert(table, *rows[0]), rows)

    def replace(self, table: str, key: str, *rows: Values) -> None:
        """Deletes the rows with the keys of these, and inserts these."""
        self.delete(table, key, [row[key] for row in rows])
        self.insert(table, *rows)

    def update(self, table: str, key: str, row: Values) -> int:
        """Changes the row with the same key, if there is one; returns how many there were."""
        return self.execute(update(table, key, *row), **row)

    def delete(self, table: str, key: str, values: Iterable[Any]) -> int:
        """Deletes the rows with these keys; returns how many there were."""
        given = list(values)
        return self.execute(f"DELETE FROM {table} WHERE {key} IN :given", given=given) if given else 0  # noqa: S608

    def rows(self, sql: str, /, **values: Any) -> list[Row]:
        """Returns the rows of a query, or of RETURNING."""
        cursor = self._connection.execute(sql, values)
        make = _row_type(tuple(column[0] for column in cursor.description))
        return [make(each) for each in self._connection.fetch(cursor)]

    def row(self, sql: str, /, **values: Any) -> Row:
        """Returns the first row; None: there is none."""
        return next(iter(self.rows(sql, **values)), None)

    def value(self, sql: str, /, **values: Any) -> Any:
        """Returns the first column of the first row; None: there is no row."""
        found = self._connection.fetch(self._connection.execute(sql, values))
        return found[0][0] if found else None


@cache
def _row_type(columns: tuple[str, ...]) -> Callable[[tuple[Any, ...]], Any]:
    row: Any = namedtuple("Row", columns, rename=True)  # type: ignore[misc] # noqa: PYI024 - columns of a query
    make: Callable[[tuple[Any, ...]], Any] = row._make
    return make


class FileLock:
    """An exclusive lock on a file, released by `release` and, whatever happens, by the end of the process."""

    def __init__(self, role: OwnerRole) -> None:
        self._role = role
        self._descriptor: int | None = None

    def acquire(self, path: str) -> None:
        """Takes the lock; raises ALREADY_EXISTS when another process holds it."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            lock_file(descriptor)
        except BlockingIOError as error:
            os.close(descriptor)
            raise self._role.owned_elsewhere() from error
        self._descriptor = descriptor

    def release(self) -> None:
        """Releases the lock, if it is held.

        The file stays: removing it would let a third process lock a new file while a second still waits for this one.
        """
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class SqliteConnection(Connection):
    """SQLite: durable commits, readers of other processes beside the writer, foreign keys.

    A role that locks its file owns the database by a lock file beside it, which cannot be lost while the process lives.
    """

    dialect = "sqlite"
    owner = None

    def __init__(self, address: DatabaseAddress, role: OwnerRole | None) -> None:
        self._path = address.path
        self._lock = FileLock(role) if role is not None and role.locks_file and address.path is not None else None
        self._raw: sqlite3.Connection | None = None

    def open(self) -> None:
        """Connects, and checks the structure of a file of up to MAX_CHECKED_BYTES."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._lock is not None:
                self._lock.acquire(f"{self._path}.lock")
            # For its owner's eyes only: it may hold secrets. SQLite's side files inherit its mode.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            self._raw = sqlite3.connect(
                self._path or ":memory:",
                timeout=BUSY_TIMEOUT_MS / 1000,
                # The module's own BEGIN leaves DDL and SELECT outside of transactions.
                isolation_level=None,
                detect_types=sqlite3.PARSE_DECLTYPES,
                # Only `interrupt` is called from another thread.
                check_same_thread=False,
                cached_statements=512,
            )
        except sqlite3.Error as error:
            raise _sqlite_error(error) from None
        for pragma in _PRAGMAS:
            self.execute(f"PRAGMA {pragma}", {})
        if self._path is not None and self._path.stat().st_size <= MAX_CHECKED_BYTES:
            found = self.fetch(self.execute("PRAGMA quick_check(1)", {}))[0][0]
            if found != "ok":
                raise DatabaseError("SQLITE_CORRUPT", found)

    def begin(self, *, writes: bool) -> None:
        """Begins; a writer takes the write lock here, because a transaction that has read cannot wait for it."""
        if not writes:
            self.execute("BEGIN", {})
            return
        # The store tries again, and reads meanwhile.
        self.execute(f"PRAGMA busy_timeout={LOCK_TRY_MS}", {})
        try:
            self.execute("BEGIN IMMEDIATE", {})
        finally:
            self.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}", {})

    def commit(self) -> None:
        """Commits."""
        self.execute("COMMIT", {})

    def rollback(self) -> None:
        """Undoes the transaction, if there is one."""
        if self.is_in_transaction:
            self.execute("ROLLBACK", {})

    def execute(self, sql: str, values: Values) -> sqlite3.Cursor:
        """Runs a statement."""
        try:
            return self._opened.execute(sqlite_text(sql), sqlite_values(values))
        except sqlite3.Error as error:
            raise _sqlite_error(error) from None

    def execute_many(self, sql: str, rows: Sequence[Values]) -> None:
        """Runs a statement once per row."""
        try:
            self._opened.executemany(sqlite_text(sql), map(sqlite_values, rows))
        except sqlite3.Error as error:
            raise _sqlite_error(error) from None

    def fetch(self, cursor: sqlite3.Cursor) -> list[tuple[Any, ...]]:
        """Returns the rows that are left."""
        try:
            return cursor.fetchall()
        except sqlite3.Error as error:
            raise _sqlite_error(error) from None

    @property
    def is_in_transaction(self) -> bool:
        """Whether a transaction goes on."""
        return self._raw is not None and self._raw.in_transaction

    @property
    def changes(self) -> int:
        """Rows that were changed so far."""
        return self._opened.total_changes

    def mark_owner(self, tx: Tx) -> None:
        """Does nothing: the lock file is the only mark."""

    def beat(self, tx: Tx) -> bool:
        """Returns that no standby is there."""
        del tx
        return False

    def interrupt(self) -> None:
        """Ends the statement in progress."""
        if self._raw is not None:
            self._raw.interrupt()

    def close(self) -> None:
        """Closes the file, then releases its lock."""
        raw, self._raw = self._raw, None
        if raw is not None:
            raw.close()
        if self._lock is not None:
            self._lock.release()

    @property
    def _opened(self) -> sqlite3.Connection:
        assert self._raw is not None, "it is open"
        return self._raw


def _sqlite_error(error: sqlite3.Error) -> DatabaseError:
    # SQLite's messages name tables and columns, never values.
    return DatabaseError(getattr(error, "sqlite_errorname", None) or type(error).__name__, str(error))


# The module knows converters by the declared type of a column, for connections that ask for them.
sqlite3.register_converter("DATETIME", moment_from)
sqlite3.register_converter("BOOLEAN", lambda value: value != b"0")
