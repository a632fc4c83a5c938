"""PostgreSQL with psycopg: one connection, which also holds the owner's lock."""

import socket
from contextlib import suppress
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.pq import TransactionStatus
from psycopg.types.numeric import FloatLoader
from typing_extensions import override

from weft.kernel.errors import WeftError
from weft.kernel.names import new_id
from weft.kernel.reasons import Reason
from weft.sql.address import DatabaseAddress
from weft.sql.connections import Connection, DatabaseError, Tx
from weft.sql.owners import OwnerRole
from weft.sql.statements import Values, postgres_text

MAX_ADDRESS_CHARS = 512
"""Longer addresses of owners are cut."""
# A process that was just killed, or a connection that just broke, may hold the lock a little longer.
LOCK_WAIT_MS = 1_000
CONNECT_TIMEOUT_SECONDS = 10
STATEMENT_TIMEOUT_SECONDS = 30.0
SILENCE_SECONDS = 5.0
"""How long the server may exceed the statement timeout, at which it should have ended the statement."""
SERVER_SETTINGS = {
    # Acknowledged changes are on disk, even if the server's default is weaker.
    "synchronous_commit": "on",
    "timezone": "UTC",
    # The lock of a machine that disappeared is freed after about a minute; the server's default is two hours.
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    # Other processes may wait for row locks of a stopped one.
    "idle_in_transaction_session_timeout": "30s",
}
_DATA_EXCEPTION_CLASS = "22"
"""SQLSTATE class of invalid values, with messages that quote the value."""
_LOCK_NOT_AVAILABLE = "55P03"
_HAS_STANDBY = """
    SELECT EXISTS (SELECT 1 FROM pg_stat_activity WHERE application_name = :name AND datname = current_database())
"""

T = TypeVar("T")


class _LimitedConnection(psycopg.Connection[tuple[Any, ...]]):
    """A connection that does not wait for a frozen server forever."""

    @override
    def wait(self, gen: PQGen[T], interval: float = 0.1, timeout: float | None = None) -> T:
        limit = STATEMENT_TIMEOUT_SECONDS + SILENCE_SECONDS
        try:
            return super().wait(gen, interval, limit if timeout is None else timeout)
        except psycopg.errors._WaitTimeout:  # noqa: SLF001 - documented for the method
            self.pgconn.finish()
            raise


class PostgresConnection(Connection):
    """PostgreSQL. An advisory lock on this connection, which all statements use, makes the process the owner.

    Guaranteed: every transaction of this connection holds the lock, so two owners never write concurrently. A broken
    connection releases the lock and rolls back its transaction. The next transaction reconnects, takes the lock, and
    checks the role's table for another owner in between. If there was one, this process's memory no longer matches the
    database, and it writes nothing until it is restarted.

    The owner's row has its address, the server process of its connection, and a heartbeat by the server's clock, which
    `weft.sql.standby` reads.

    Not guaranteed: if the connection breaks between COMMIT and its acknowledgement, the caller gets SERVICE_UNAVAILABLE
    although the transaction may be committed. The lock belongs to a server session, so a proxy must not share sessions
    (pgbouncer: `pool_mode = session`).
    """

    dialect = "postgresql"
    driver_error = psycopg.Error
    _raw: psycopg.Connection[tuple[Any, ...]] | None

    def __init__(self, address: DatabaseAddress, application: str, role: OwnerRole | None, own_address: str) -> None:
        """`application` is the connection's application name, `own_address` the address at which the owner serves."""
        self._address = address
        self._application = application
        self._role = role
        self._own_address = own_address

    @override
    def open(self) -> None:
        settings = SERVER_SETTINGS | {"statement_timeout": f"{STATEMENT_TIMEOUT_SECONDS * 1000:.0f}"}
        try:
            self._raw = _LimitedConnection.connect(
                self._address.url,
                autocommit=True,
                application_name=self._application,
                # With SQL_ASCII, texts would be bytes.
                client_encoding="utf8",
                connect_timeout=CONNECT_TIMEOUT_SECONDS,
                options=" ".join(f"-c {name}={value}" for name, value in settings.items()),
            )
        except psycopg.Error as error:
            reason = str(error).partition("\n")[0].rpartition(": ")[2]
            code = error.sqlstate or f"no connection: {reason}"
            raise DatabaseError(code, f"{self._address.shown}: {reason}") from None
        # Sums have this type.
        self._raw.adapters.register_loader("numeric", FloatLoader)
        try:
            if self._role is not None:
                self._claim(self._role)
        except BaseException:
            super().close()
            raise

    @override
    def bound(self, sql: str, values: Values) -> tuple[str, Values]:
        # psycopg would pass a tuple as a record.
        return postgres_text(sql), {n: list(value) if type(value) is tuple else value for n, value in values.items()}

    @override
    def failure(self, error: psycopg.Error) -> DatabaseError:
        kind, state = type(error).__name__, error.sqlstate or ""
        # Only the message: the details quote rows.
        text = error.diag.message_primary if state and not state.startswith(_DATA_EXCEPTION_CLASS) else None
        return DatabaseError(state or kind, f"{self._address.shown}: {kind} {state}{f': {text}' if text else ''}")

    @override
    def begin(self, *, writes: bool) -> None:
        """Begins a transaction; reconnects if the connection broke."""
        statement = "BEGIN" if writes else "BEGIN READ ONLY"
        if self._raw is not None and not self._raw.closed:
            try:
                self.execute(statement)
            except DatabaseError:
                if not self._raw.closed:
                    raise
            else:
                return
        self.open()
        self.execute(statement)

    @override
    def commit(self) -> None:
        """Commits. Raises DatabaseError if a statement of the transaction failed."""
        if self.execute("COMMIT").statusmessage != "COMMIT":
            raise DatabaseError("25P02", f"{self._address.shown}: a statement of the transaction failed")

    @property
    @override
    def is_in_transaction(self) -> bool:
        raw = self._raw
        return raw is not None and not raw.closed and raw.info.transaction_status != TransactionStatus.IDLE

    @override
    def mark_owner(self, tx: Tx) -> None:
        if self._role is None:
            return
        # Waits for transactions of the former owner.
        tx.execute(f"DELETE FROM {self._role.table}")  # noqa: S608 - the table of the role
        owner = new_id("own")
        # The first heartbeat sets `backend_pid`: before that the owner loads all data, which may take long.
        row = {
            "id": 1,
            "owner": owner,
            "address": self._own_address[:MAX_ADDRESS_CHARS],
            "backend_pid": None,
            "beat": 0,
        }
        tx.insert(self._role.table, row)
        tx.execute(f"UPDATE {self._role.table} SET beat_at = clock_timestamp()")  # noqa: S608 - as above
        self.owner = owner

    @override
    def beat(self, tx: Tx) -> bool:
        """Writes a heartbeat. Returns whether a standby is connected.

        The write is not synced to disk, since a heartbeat need not survive a crash of PostgreSQL.
        """
        assert self._role is not None, "owners alone beat"
        tx.execute("SET LOCAL synchronous_commit TO off")
        tx.execute(
            f"UPDATE {self._role.table} SET beat = beat + 1, beat_at = clock_timestamp(), "  # noqa: S608 - as above
            "backend_pid = pg_backend_pid() WHERE owner = :owner",
            owner=self.owner,
        )
        return bool(tx.value(_HAS_STANDBY, name=self._role.standby_application))

    @override
    def interrupt(self) -> None:
        raw = self._raw
        if raw is not None and not raw.closed:
            with suppress(OSError, psycopg.Error), socket.socket(fileno=socket.dup(raw.fileno())) as same:
                same.shutdown(socket.SHUT_RDWR)

    @override
    def close(self) -> None:
        if self._raw is not None and not self._raw.closed and self._role is not None:
            # Closing also frees the lock, but only when the server notices; the next owner may be faster.
            with suppress(DatabaseError):
                self.rollback()
                self.execute("SELECT pg_advisory_unlock_all()")
        self.owner = None
        super().close()

    def _claim(self, role: OwnerRole) -> None:
        """Takes the lock, and checks that no other process has owned the database meanwhile."""
        try:
            self.execute(f"SET lock_timeout = {LOCK_WAIT_MS}")
            self.execute("SELECT pg_advisory_lock(:key)", {"key": role.lock_key})
            self.execute("SET lock_timeout = 0")
        except DatabaseError as error:
            if error.code != _LOCK_NOT_AVAILABLE:
                raise
            if self.owner is None:
                raise role.owned_elsewhere() from None
            self._require_own(role)
            raise WeftError(
                Reason.SERVICE_UNAVAILABLE,
                f"this {role.service} lost its hold on the database, and its old connection or another has it",
            ) from None
        self._require_own(role)

    def _require_own(self, role: OwnerRole) -> None:
        if self.owner is None:
            return
        found = self.fetch(self.execute(f"SELECT owner FROM {role.table}"))  # noqa: S608 - as above
        if found != [(self.owner,)]:
            raise role.taken_over()
