"""A PostgreSQL database that one process owns: the advisory lock, and the heartbeat that a standby watches.

A registry owns all that it keeps; of several routers the one that leads owns placement.
"""

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

from sqlalchemy import URL, Table, delete, event, func, insert, text, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.missing_package import missing_package
from weft.kernel.names import new_id
from weft.kernel.reasons import Reason

MAX_ADDRESS_CHARS = 512
"""Characters of an owner's address; longer ones are cut."""


@dataclass(frozen=True)
class OwnerRole:
    """What one process of a database does alone."""

    service: str
    """The word for such a process, such as `registry`."""
    table: Table
    """One row about the owner: `id`, `owner`, `address`, `backend_pid`, `beat`, `beat_at`."""
    standby_reason: Reason
    """The reason with which a standby refuses calls."""
    advice: str
    """What callers of a standby can do."""

    @cached_property
    def lock_key(self) -> int:
        """The number of its advisory lock: derived from a unique name, since other programs use such locks, too."""
        digest = hashlib.sha256(f"weft.{self.service}.store.owner".encode()).digest()
        return int.from_bytes(digest[:8], "big", signed=True)

    @property
    def owner_application(self) -> str:
        """The name by which PostgreSQL lists the connection of an owner."""
        return f"weft-{self.service}-owner"

    @property
    def standby_application(self) -> str:
        """The name by which PostgreSQL lists the connections of those that wait for its end."""
        return f"weft-{self.service}-standby"

    def taken_over(self) -> "TakenOverError":
        """Returns the error of a former owner."""
        return TakenOverError(
            Reason.SERVICE_UNAVAILABLE,
            f"another {self.service} has taken over this database; stop or restart this one",
        )

    def owned_elsewhere(self) -> WeftError:
        """Returns the error of an attempt to own a database that another process owns."""
        return WeftError(
            Reason.ALREADY_EXISTS,
            f"another {self.service} runs on this database; stop it, or give this one a database of its own; "
            f"on PostgreSQL, `weft serve {self.service}` waits as its standby",
        )


class TakenOverError(WeftError):
    """Another process owns the database by now, so that this one's memory no longer matches it."""


# A process that was killed a moment ago, or the connection that just broke, may hold the lock a little longer.
LOCK_WAIT_MS = 1_000
CONNECT_TIMEOUT_SECONDS = 10.0
STATEMENT_TIMEOUT_SECONDS = 30.0
# The owner writes one transaction at a time; longer waits for the connection fail.
CONNECTION_WAIT_SECONDS = 30.0
CLOSE_TIMEOUT_SECONDS = 2.0
SERVER_SETTINGS = {
    # Acknowledged changes are on disk, also where the server's default is weaker.
    "synchronous_commit": "on",
    # The lock of a machine that vanished is free after about a minute; the server's default is two hours.
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}
# SQLSTATE class 22: values of the wrong form. Such messages quote the value.
_DATA_EXCEPTION_CLASS = "22"


def new_engine(url: URL, application: str) -> AsyncEngine:
    """Returns an engine of one connection, which the server lists under the name of an `application`."""
    return create_async_engine(
        url,
        hide_parameters=True,
        pool_size=1,
        max_overflow=0,
        pool_timeout=CONNECTION_WAIT_SECONDS,
        pool_pre_ping=True,
        connect_args={
            "timeout": CONNECT_TIMEOUT_SECONDS,
            "command_timeout": STATEMENT_TIMEOUT_SECONDS,
            "server_settings": SERVER_SETTINGS | {"application_name": application},
        },
    )


_HAS_STANDBY = text(
    "SELECT EXISTS (SELECT 1 FROM pg_stat_activity WHERE application_name = :name AND datname = current_database())"
)


class PostgresOwner:
    """PostgreSQL, owned by an advisory lock on the one connection that everything goes through.

    Guaranteed: every transaction of this connection holds the lock, so two owners never write with theirs at once. A
    connection that breaks takes the lock with it and leaves its transaction undone; the next call opens a new one,
    takes the lock again, and reads in the role's table whether another process was here in between. If one was, this
    one's memory no longer matches the database, and it writes nothing until it is restarted.

    The owner's row has its address, the process of the server that serves its connection, and a heartbeat by the
    server's clock: `weft.sql.standby` reads them.

    Not guaranteed: a connection may break after COMMIT was sent and before it was acknowledged. The caller gets
    SERVICE_UNAVAILABLE then, and the write is there either completely or not at all. The lock belongs to a session of
    the server, so a proxy in between must not share sessions (pgbouncer: `pool_mode = session`).
    """

    may_have_standby = True

    def __init__(self, url: URL, role: OwnerRole, address: str = "") -> None:
        """`address`: where this process serves."""
        try:
            driver = import_module("asyncpg")
        except ImportError as error:
            raise invalid_field("database_url", missing_package("PostgreSQL needs", "asyncpg")) from error
        self.driver_errors: tuple[type[Exception], ...] = (
            driver.PostgresError,
            driver.InterfaceError,
            driver.InternalClientError,
        )
        self._lock_not_available: type[Exception] = driver.LockNotAvailableError
        self.url = url
        self._role = role
        self._address = address
        self._engine: AsyncEngine | None = None
        self._connection: Any | None = None
        """The driver's connection that holds the lock, or held it last."""
        self._owner: str | None = None
        """The id that this process wrote into the role's table; None until then."""

    @property
    def owner(self) -> str | None:
        """The id under which this process owns the database; None: it does not, or has not marked it yet."""
        return self._owner

    def take(self) -> AsyncEngine:
        """Returns an engine whose connections hold the lock; without it the first raises ALREADY_EXISTS."""
        self._engine = new_engine(self.url, self._role.owner_application)

        @event.listens_for(self._engine.sync_engine, "connect")
        def claim(connection: Any, _record: object) -> None:
            connection.run_async(self._claim)

        return self._engine

    async def mark(self, connection: AsyncConnection) -> None:
        """Records the new owner. Transactions of the former one that have begun end first."""
        owner, table = new_id("own"), self._role.table
        await connection.execute(delete(table))
        await connection.execute(
            insert(table).values(
                id=1,
                owner=owner,
                address=self._address[:MAX_ADDRESS_CHARS],
                # Set by the first heartbeat: until then it reads everything back, which may take its time.
                backend_pid=None,
                beat=0,
                beat_at=func.clock_timestamp(),
            )
        )
        self._owner = owner

    async def beat(self, connection: AsyncConnection) -> bool:
        """Writes a heartbeat; returns whether a standby is there.

        The write is not synced to disk: a heartbeat need not outlive a crash of PostgreSQL.
        """
        table = self._role.table
        await connection.execute(text("SET LOCAL synchronous_commit TO off"))
        await connection.execute(
            update(table)
            .where(table.c.owner == self._owner)
            .values(beat=table.c.beat + 1, beat_at=func.clock_timestamp(), backend_pid=func.pg_backend_pid())
        )
        return bool((await connection.execute(_HAS_STANDBY, {"name": self._role.standby_application})).scalar_one())

    async def release(self) -> None:
        """Gives the lock up, and closes the engine. Safe to call twice."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            # Closing alone frees the lock too, but only when the server notices; the next owner may be quicker.
            with suppress(*self.driver_errors, OSError):
                await connection.execute("SELECT pg_advisory_unlock_all()", timeout=CLOSE_TIMEOUT_SECONDS)
        self._owner = None
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await engine.dispose()

    def explain(self, error: Exception) -> str:
        """Returns what the log may have of a failure: no written values, and no password."""
        # The driver's own text would quote the rows that the statement was about.
        cause = _driver_error(error)
        sqlstate = str(getattr(cause, "sqlstate", None) or "")
        text = f": {cause.args[0]}" if sqlstate and not sqlstate.startswith(_DATA_EXCEPTION_CLASS) else ""
        if isinstance(cause, OSError):
            text = f": {cause}"
        shown_url = self.url.set(query={}).render_as_string(hide_password=True)
        return f"{shown_url}: {type(cause).__name__} {sqlstate}{text}"

    async def _claim(self, connection: Any) -> None:
        """Take the lock on a new connection, and check that no other process owned the database meanwhile."""
        try:
            await self._lock(connection)
            await self._require_own(connection)
        except BaseException:
            # The pool does not know the connection yet, so it would not close it.
            connection.terminate()
            raise
        self._connection = connection

    async def _lock(self, connection: Any) -> None:
        try:
            async with connection.transaction():
                await connection.execute(f"SET LOCAL lock_timeout = {LOCK_WAIT_MS}")
                # Of the session, not of the transaction: it outlives this block.
                await connection.fetchval("SELECT pg_advisory_lock($1)", self._role.lock_key)
        except self._lock_not_available:
            if self._owner is None:
                raise self._role.owned_elsewhere() from None
            await self._require_own(connection)
            raise WeftError(
                Reason.SERVICE_UNAVAILABLE,
                f"this {self._role.service} lost its hold on the database, and its old connection or another has it",
            ) from None

    async def _require_own(self, connection: Any) -> None:
        if self._owner is None:
            return
        # The table's name is the role's: nothing of it comes from outside.
        if await connection.fetchval(f"SELECT owner FROM {self._role.table.name}") != self._owner:  # noqa: S608
            raise self._role.taken_over()


def _driver_error(error: Exception) -> BaseException:
    """The innermost cause: SQLAlchemy wraps its adapter's error, and that the driver's."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return cause
