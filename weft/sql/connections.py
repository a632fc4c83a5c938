"""The database connection of a store, and its transactions. Everything runs in the store's thread."""

import errno
import os
import sqlite3
from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, ClassVar

from typing_extensions import override

from weft.kernel.machine.file_replacement import lock_file
from weft.sql.address import DatabaseAddress
from weft.sql.owners import OwnerRole
from weft.sql.statements import Values, delete, insert, moment_from, sqlite_text, sqlite_values, update

_RESTORE = "restore it from a backup, or move it away to begin with an empty one"
_FULL = "free some space on its disk"
_ACCESS = "let this user read and write it and its folder, or choose another home"
_CONNECT = "check that it is running and accepts connections"
_PRIMARY = "check that its address leads to the primary server"
_REMEDIES = {
    "SQLITE_NOTADB": ("is no database", _RESTORE),
    "SQLITE_CORRUPT": ("is damaged", _RESTORE),
    "SQLITE_FULL": ("cannot be written", _FULL),
    "SQLITE_IOERR": ("cannot be read or written", "check its disk: it may be full or failing"),
    "SQLITE_READONLY": ("is read-only", _ACCESS),
    "SQLITE_CANTOPEN": ("cannot be opened", _ACCESS),
    "SQLITE_PERM": ("cannot be opened", _ACCESS),
    "SQLITE_BUSY": ("is locked by another program", "end that program"),
    "25006": ("is read-only", _PRIMARY),
    "53100": ("cannot be written", _FULL),
    "57P03": ("is starting up or recovering", "wait for it"),
}
_FULL_NUMBERS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DatabaseError(Exception):
    """A failed statement, commit or connection. The text contains no written values and no password."""

    def __init__(self, code: str, text: str) -> None:
        """`code` is, for example, SQLITE_FULL or an SQLSTATE; `text` is for the log."""
        super().__init__(text)
        self.code = code


def sentence_of(owner: str, address: DatabaseAddress, error: DatabaseError | OSError) -> str:
    """Returns a sentence with the problem of a service's database, and the remedy."""
    location = location_of(owner, address)
    if isinstance(error, OSError):
        remedy = _FULL if error.errno in _FULL_NUMBERS else _ACCESS
        return f"{location} cannot be used: {error.strerror or error.errno}; {remedy}"
    return f"{location} {problem_of(error, _CONNECT)}"


def problem_of(error: DatabaseError, otherwise: str = "its log has details") -> str:
    """Returns a problem and its remedy, such as `cannot be written (SQLITE_FULL); free some space on its disk`.

    `otherwise` is the remedy of an unknown problem.
    """
    what, remedy = _REMEDIES.get("_".join(error.code.split("_")[:2]), ("cannot be used", otherwise))
    return f"{what} ({error.code}); {remedy}"


def location_of(owner: str, address: DatabaseAddress) -> str:
    """Returns a text such as `the router's database /var/lib/weft/router.db`."""
    return f"the {owner}'s database {address.location}"


MAX_CHECKED_BYTES = 256 * 1024 * 1024
"""A larger file is opened without the integrity check, which reads all of it."""
BUSY_TIMEOUT_MS = 5_000
"""Maximum wait for a lock that another program holds."""
LOCK_TRY_MS = 10
"""Maximum wait of one attempt to begin a write; reads run between attempts."""
_PRAGMAS = (
    "journal_mode=WAL",
    "synchronous=FULL",
    "foreign_keys=ON",
    # Overwrite deleted rows, which may contain secrets.
    "secure_delete=ON",
)

Row = Any
"""A named tuple of columns."""


class Tx:
    """A transaction. Statements have `:name` parameters, passed by keyword: `tx.row("… WHERE id = :id", id=name)`.

    Methods raise DatabaseError.
    """

    def __init__(self, connection: "Connection") -> None:
        self._connection = connection
        self.dialect = connection.dialect
        """`sqlite` or `postgresql`, for the few statements that differ."""

    def execute(self, sql: str, /, **values: Any) -> int:
        """Runs a statement. Returns the number of changed rows."""
        return int(self._connection.execute(sql, values).rowcount)

    def many(self, sql: str, rows: Iterable[Values], /) -> None:
        """Runs a statement once per row of values."""
        given = list(rows)
        if len(given) == 1:
            # psycopg uses a pipeline for many rows, which costs more than one statement.
            self._connection.execute(sql, given[0])
        elif given:
            self._connection.execute_many(sql, given)

    def insert(self, table: str, *rows: Values) -> None:
        """Inserts rows, all with the same columns."""
        if rows:
            self.many(insert(table, *rows[0]), rows)

    def replace(self, table: str, key: str, *rows: Values) -> None:
        """Inserts rows, after deleting those with the same keys."""
        self.delete(table, key, [row[key] for row in rows])
        self.insert(table, *rows)

    def update(self, table: str, key: str, row: Values) -> int:
        """Updates the row with the same key. Returns the number of changed rows."""
        return self.execute(update(table, key, *row), **row)

    def delete(self, table: str, key: str, values: Iterable[Any]) -> int:
        """Deletes the rows with these keys. Returns their number."""
        given = list(values)
        return self.execute(delete(table, key), given=given) if given else 0

    def rows(self, sql: str, /, **values: Any) -> list[Row]:
        """Returns the rows of a query or RETURNING clause."""
        cursor = self._connection.execute(sql, values)
        make = _row_type(tuple(column[0] for column in cursor.description))
        return [make(each) for each in self._connection.fetch(cursor)]

    def row(self, sql: str, /, **values: Any) -> Row:
        """Returns the first row, or None."""
        return next(iter(self.rows(sql, **values)), None)

    def stream(self, sql: str, rows_at_once: int, /) -> tuple[list[str], Iterator[list[Any]]]:
        """Returns the columns of a query without values, and its rows, which are read while the transaction is open."""
        cursor = self._connection.stream(sql)

        def rows() -> Iterator[list[Any]]:
            while some := self._connection.called(cursor.fetchmany, rows_at_once):
                yield from map(list, some)
            cursor.close()

        return [column[0] for column in cursor.description], rows()

    def value(self, sql: str, /, **values: Any) -> Any:
        """Returns the first column of the first row, or None."""
        found = self._connection.fetch(self._connection.execute(sql, values))
        return found[0][0] if found else None


@cache
def _row_type(columns: tuple[str, ...]) -> Callable[[tuple[Any, ...]], Any]:
    row: Any = namedtuple("Row", columns, rename=True)  # type: ignore[misc] # noqa: PYI024 - columns of a query
    make: Callable[[tuple[Any, ...]], Any] = row._make
    return make


class Connection(ABC):
    """A connection of a database driver. Methods raise DatabaseError."""

    dialect: ClassVar[str]
    driver_error: ClassVar[type[Exception]]
    owner: str | None = None
    """The id that this process wrote into the role's table; None before, and on SQLite."""
    is_in_doubt = False
    """Whether the connection broke during the last `commit`, so that only `settle` can find out if it was stored."""
    _raw: Any = None
    """The driver's connection; None: not open."""

    @abstractmethod
    def open(self) -> None:
        """Connects. Raises OSError for a file, ALREADY_EXISTS if another process owns the database."""

    @abstractmethod
    def bound(self, sql: str, values: Values) -> tuple[str, Values]:
        """Returns a statement and its values in the driver's form."""

    @abstractmethod
    def failure(self, error: Any) -> DatabaseError:
        """Returns a driver's error as a DatabaseError, without values."""

    @abstractmethod
    def begin(self, *, writes: bool) -> None:
        """Begins a transaction."""

    def commit(self) -> None:
        """Commits durably."""
        self.execute("COMMIT")

    def settle(self) -> bool:
        """Returns whether the last commit was stored; asks the database if that is in doubt.

        Raises DatabaseError and WeftError if the database gives no answer.
        """
        return not self.is_in_doubt

    def rollback(self) -> None:
        """Rolls back the transaction, if any."""
        if self.is_in_transaction:
            self.execute("ROLLBACK")

    def execute(self, sql: str, values: Values | None = None) -> Any:
        """Runs a statement. Returns the driver's cursor."""
        return self.called(self._raw.execute, *((sql,) if not values else self.bound(sql, values)))

    def execute_many(self, sql: str, rows: Sequence[Values]) -> None:
        """Runs a statement once per row."""
        self.called(self._raw.cursor().executemany, self.bound(sql, {})[0], [self.bound(sql, row)[1] for row in rows])

    def stream(self, sql: str) -> Any:
        """Runs a query and returns a cursor, which reads each row from the database when it is fetched."""
        return self.execute(sql)

    def fetch(self, cursor: Any) -> list[tuple[Any, ...]]:
        """Returns the remaining rows."""
        found: list[tuple[Any, ...]] = self.called(cursor.fetchall)
        return found

    @property
    @abstractmethod
    def is_in_transaction(self) -> bool:
        """Whether a transaction is open. Some failures end it."""

    @property
    def changes(self) -> int:
        """Number of rows changed so far; 0 if the database does not count them."""
        return 0

    def mark_owner(self, tx: Tx) -> None:  # noqa: B027 - SQLite uses a lock file instead
        """Records the new owner, in the transaction that opens the database."""

    def beat(self, tx: Tx) -> bool:
        """Writes the owner's heartbeat. Returns whether a standby is connected."""
        del tx
        return False

    @abstractmethod
    def interrupt(self) -> None:
        """Interrupts the statement in progress. Called from another thread."""

    def close(self) -> None:
        """Releases ownership and disconnects. Safe to call twice, or when not connected."""
        raw, self._raw = self._raw, None
        if raw is not None:
            raw.close()

    def called(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the result of a call of the driver. Raises DatabaseError."""
        try:
            return call(*arguments)
        except self.driver_error as error:
            raise self.failure(error) from None


class SqliteConnection(Connection):
    """SQLite with durable commits, concurrent readers in other processes, and foreign keys.

    A role with `locks_file` holds the database through a lock file, which cannot be lost while the process runs.
    """

    dialect = "sqlite"
    driver_error = sqlite3.Error

    def __init__(self, address: DatabaseAddress, role: OwnerRole | None) -> None:
        self._path = address.path
        self._role = role
        self._lock: int | None = None
        """The lock file; None: not locked."""

    @override
    def open(self) -> None:
        path = self._path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if self._role is not None and self._role.locks_file:
                self._lock = _locked(f"{path}.lock", self._role)
            # Readable only by its owner, since it may contain secrets. SQLite's other files inherit its mode.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            self._raw = sqlite3.connect(
                path or ":memory:",
                timeout=BUSY_TIMEOUT_MS / 1000,
                # The module's implicit BEGIN leaves DDL and SELECT outside of transactions.
                isolation_level=None,
                detect_types=sqlite3.PARSE_DECLTYPES,
                # Only `interrupt` is called from another thread.
                check_same_thread=False,
                cached_statements=512,
            )
        except sqlite3.Error as error:
            raise self.failure(error) from None
        for pragma in _PRAGMAS:
            self.execute(f"PRAGMA {pragma}")
        if path is not None and path.stat().st_size <= MAX_CHECKED_BYTES:
            found = self.fetch(self.execute("PRAGMA quick_check(1)"))[0][0]
            if found != "ok":
                raise DatabaseError("SQLITE_CORRUPT", found)

    @override
    def bound(self, sql: str, values: Values) -> tuple[str, Values]:
        return sqlite_text(sql), sqlite_values(values)

    @override
    def failure(self, error: sqlite3.Error) -> DatabaseError:
        # SQLite's messages name tables and columns, never values.
        return DatabaseError(getattr(error, "sqlite_errorname", None) or type(error).__name__, str(error))

    @override
    def begin(self, *, writes: bool) -> None:
        if not writes:
            self.execute("BEGIN")
            return
        # A transaction that has read cannot wait for the write lock. The store retries, and reads meanwhile.
        self.execute(f"PRAGMA busy_timeout={LOCK_TRY_MS}")
        try:
            self.execute("BEGIN IMMEDIATE")
        finally:
            self.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")

    @property
    @override
    def is_in_transaction(self) -> bool:
        return self._raw is not None and bool(self._raw.in_transaction)

    @property
    @override
    def changes(self) -> int:
        return int(self._raw.total_changes)

    @override
    def interrupt(self) -> None:
        if self._raw is not None:
            self._raw.interrupt()

    @override
    def close(self) -> None:
        super().close()
        # Keep the file: if it were removed, a third process could lock a new file while a second waits for this one.
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _locked(path: str, role: OwnerRole) -> int:
    """Locks a file until it is closed or the process ends. Raises ALREADY_EXISTS if another one does not share it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        lock_file(descriptor, is_shared=role.shares_file)
    except BlockingIOError as error:
        os.close(descriptor)
        raise role.owned_elsewhere() from error
    return descriptor


# Converters by declared column type; connections enable them with PARSE_DECLTYPES.
sqlite3.register_converter("DATETIME", moment_from)
sqlite3.register_converter("BOOLEAN", lambda value: value != b"0")
