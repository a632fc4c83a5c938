"""PostgreSQL with psycopg: one connection, which also holds the owner's lock."""

import re
import socket
from contextlib import suppress
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.pq import TransactionStatus
from psycopg.types.numeric import FloatLoader
from typing_extensions import override

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft.kernel.values.names import new_id
from weft.sql.address import DatabaseAddress
from weft.sql.connections import Connection, DatabaseError, Tx
from weft.sql.owners import OwnerRole
from weft.sql.statements import Values, postgres_text

log = get_logger("weft.sql")

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
_OTHER_SERVER = re.compile("25006|55000|57P..")
"""SQLSTATEs of a server that is no primary (any more), or ends: the next transaction connects again."""
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

    Every commit, except of a heartbeat, writes its number into the owner's row. If the connection breaks between COMMIT
    and its acknowledgement, `settle` reads there whether it took place, also from the server that a failover made the
    primary.

    Only a primary is connected to. After an error of a server that is none any more, the next transaction reconnects.

    Not guaranteed: the lock belongs to a server session, so a proxy must not share sessions (pgbouncer:
    `pool_mode = session`).
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
        self._is_elsewhere = False
        """Whether the connection leads to a server that cannot write."""
        self._is_numbered = False
        """Whether the transaction gets a number if it changes something."""
        self._sent = self._acknowledged = 0
        """Numbers of the last commit that was sent, and of the last one known to be stored."""

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
                target_session_attrs="primary",
                options=" ".join(f"-c {name}={value}" for name, value in settings.items()),
            )
        except psycopg.Error as error:
            reason = str(error).partition("\n")[0].rpartition(": ")[2]
            code = error.sqlstate or f"no connection: {reason}"
            raise DatabaseError(code, f"{self._address.shown}: {reason}") from None
        self._is_elsewhere = False
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
        self._is_elsewhere |= _OTHER_SERVER.fullmatch(state) is not None
        # Only the message: the details quote rows.
        text = error.diag.message_primary if state and not state.startswith(_DATA_EXCEPTION_CLASS) else None
        return DatabaseError(state or kind, f"{self._address.shown}: {kind} {state}{f': {text}' if text else ''}")

    @override
    def begin(self, *, writes: bool) -> None:
        """Begins a transaction; reconnects if the connection broke, or leads to a server that is no primary."""
        statement = "BEGIN" if writes else "BEGIN READ ONLY"
        self._is_numbered = writes and self.owner is not None
        if self._raw is not None and self._is_elsewhere:
            super().close()
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
        if self._role is None or not self._is_numbered:
            if self.execute("COMMIT").statusmessage != "COMMIT":
                raise DatabaseError("25P02", f"{self._address.shown}: a statement of the transaction failed")
            return
        self._sent += 1
        # One message, so that it costs no round trip. A transaction that changed nothing stays without a write.
        words = (
            f"UPDATE {self._role.table} SET commit_number = {self._sent} "  # noqa: S608 - the table of the role
            "WHERE txid_current_if_assigned() IS NOT NULL; COMMIT"
        )
        try:
            numbered = self.called(lambda: self._connected().execute(words, prepare=False)).rowcount
        except DatabaseError:
            self.is_in_doubt = self._raw is None or self._raw.closed
            raise
        if numbered:
            self._acknowledged = self._sent

    @override
    def settle(self) -> bool:
        self.open()
        return self._acknowledged == self._sent

    @override
    def stream(self, sql: str) -> Any:
        cursor = self._connected().cursor(name="stream")
        self.called(cursor.execute, sql)
        return cursor

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
            "commit_number": 0,
        }
        tx.insert(self._role.table, row)
        tx.execute(f"UPDATE {self._role.table} SET beat_at = clock_timestamp()")  # noqa: S608 - as above
        self.owner = owner
        self._sent = self._acknowledged = 0

    @override
    def beat(self, tx: Tx) -> bool:
        """Writes a heartbeat. Returns whether a standby is connected.

        The write is not synced to disk, since a heartbeat need not survive a crash of PostgreSQL. Its commit has no
        number, because one that is lost in a crash would be reported as a missing change.
        """
        assert self._role is not None, "owners alone beat"
        self._is_numbered = False
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
        self.owner, self.is_in_doubt = None, False
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
            self._own_commit(role)
            raise WeftError(
                Reason.SERVICE_UNAVAILABLE,
                f"this {role.service} lost its hold on the database, and its old connection or another has it",
            ) from None
        if self.owner is None:
            return
        # Only with the lock: the old connection may still be committing.
        number, self.is_in_doubt = self._own_commit(role), False
        if number < self._acknowledged:
            # A failover to a server that did not have all of it. What this process knows is newer than the database.
            log.error(
                "the database lacks changes that it had acknowledged; restart to continue from what it has",
                owner=role.service,
                url=self._address.shown,
                missing_commits=self._acknowledged - number,
            )
        self._acknowledged = number

    def _own_commit(self, role: OwnerRole) -> int:
        """Returns the number of this owner's last stored commit. Raises TakenOverError."""
        found = self.fetch(self.execute(f"SELECT owner, commit_number FROM {role.table}"))  # noqa: S608 - as above
        if [owner for owner, _ in found] != [self.owner]:
            raise role.taken_over()
        return int(found[0][1])

    def _connected(self) -> psycopg.Connection[tuple[Any, ...]]:
        assert self._raw is not None, "a transaction is open"
        return self._raw
