"""The registry's PostgreSQL: ownership by an advisory lock, and the heartbeat that a standby watches."""

import hashlib
from contextlib import suppress
from importlib import import_module
from typing import Any

from sqlalchemy import URL, Connection, delete, event, func, insert, text, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from registry_svc.store.schema import MAX_ADDRESS_CHARS, ownership
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.missing_package import missing_package
from weft.kernel.names import new_id
from weft.kernel.reasons import Reason


class TakenOverError(WeftError):
    """Another registry owns the database by now, so that this one's memory no longer matches it."""

    def __init__(self) -> None:
        super().__init__(
            Reason.SERVICE_UNAVAILABLE, "another registry has taken over this database; stop or restart this one"
        )


def owned_elsewhere() -> WeftError:
    """Returns the error of an attempt to own a database that another registry owns."""
    return WeftError(
        Reason.ALREADY_EXISTS,
        "another registry runs on this database; stop it, or give this one a database of its own; "
        "on PostgreSQL, `weft serve registry` waits as its standby",
    )


# Advisory locks are per database and identified by a 64-bit number. Other programs may use some in the same database,
# so this one is derived from a unique name.
LOCK_KEY = int.from_bytes(hashlib.sha256(b"weft.registry.store.owner").digest()[:8], "big", signed=True)
# A registry that was killed a moment ago, or the connection that just broke, may hold the lock a little longer.
LOCK_WAIT_MS = 1_000
CONNECT_TIMEOUT_SECONDS = 10.0
STATEMENT_TIMEOUT_SECONDS = 30.0
# The registry writes one transaction at a time; longer waits for the connection fail.
CONNECTION_WAIT_SECONDS = 30.0
CLOSE_TIMEOUT_SECONDS = 2.0
OWNER_APPLICATION = "weft-registry"
STANDBY_APPLICATION = "weft-registry-standby"
"""Names by which PostgreSQL lists the connections of an owner, and of registries that wait for its end."""
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


class PostgresDatabase:
    """PostgreSQL, owned by an advisory lock on the one connection that everything goes through.

    Guaranteed: every transaction of the store runs on a connection that holds the lock, so two registries never write
    to one database at once. A connection that breaks takes the lock with it and leaves its transaction undone; the next
    call opens a new connection, takes the lock again, and reads in `ownership` whether another registry was here in
    between. If one was, this registry's memory no longer matches the database, and it writes nothing until it is
    restarted.

    The owner's row in `ownership` has its address, the process of the server that serves its connection, and a
    heartbeat by the server's clock: `registry_svc.store.standby` reads them.

    Not guaranteed: a connection may break after COMMIT was sent and before it was acknowledged. The caller gets
    SERVICE_UNAVAILABLE then, and the write is there either completely or not at all. The lock belongs to a session of
    the server, so a proxy in between must not share sessions (pgbouncer: `pool_mode = session`).
    """

    may_have_standby = True

    def __init__(self, url: URL, address: str = "") -> None:
        """`address`: where this registry serves."""
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
        self._address = address
        self._engine: AsyncEngine | None = None
        self._connection: Any | None = None
        """The driver's connection that holds the lock, or held it last."""
        self._owner: str | None = None
        """The id that this registry wrote into `ownership`; None until then."""

    def take(self) -> AsyncEngine:
        """See Database.take."""
        self._engine = new_engine(self.url, OWNER_APPLICATION)

        @event.listens_for(self._engine.sync_engine, "connect")
        def claim(connection: Any, _record: object) -> None:
            connection.run_async(self._claim)

        return self._engine

    def require_whole(self, connection: Connection) -> None:
        """See Database.require_whole: the server checks its own files."""

    async def mark(self, connection: AsyncConnection) -> None:
        """See Database.mark."""
        owner = new_id("own")
        await connection.execute(delete(ownership))
        await connection.execute(
            insert(ownership).values(
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
        """See Database.beat. The write is not synced to disk: a heartbeat need not outlive a crash of PostgreSQL."""
        await connection.execute(text("SET LOCAL synchronous_commit TO off"))
        await connection.execute(
            update(ownership)
            .where(ownership.c.owner == self._owner)
            .values(beat=ownership.c.beat + 1, beat_at=func.clock_timestamp(), backend_pid=func.pg_backend_pid())
        )
        return bool((await connection.execute(_HAS_STANDBY, {"name": STANDBY_APPLICATION})).scalar_one())

    async def release(self) -> None:
        """See Database.release."""
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
        """See Database.explain."""
        # The driver's own text would quote the rows that the statement was about.
        cause = _driver_error(error)
        sqlstate = str(getattr(cause, "sqlstate", None) or "")
        text = f": {cause.args[0]}" if sqlstate and not sqlstate.startswith(_DATA_EXCEPTION_CLASS) else ""
        if isinstance(cause, OSError):
            text = f": {cause}"
        shown_url = self.url.set(query={}).render_as_string(hide_password=True)
        return f"{shown_url}: {type(cause).__name__} {sqlstate}{text}"

    async def _claim(self, connection: Any) -> None:
        """Take the lock on a new connection, and check that no other registry owned the database meanwhile."""
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
                await connection.fetchval("SELECT pg_advisory_lock($1)", LOCK_KEY)
        except self._lock_not_available:
            if self._owner is None:
                raise owned_elsewhere() from None
            await self._require_own(connection)
            raise WeftError(
                Reason.SERVICE_UNAVAILABLE,
                "the registry lost its hold on the database, and its old connection or another registry still has it",
            ) from None

    async def _require_own(self, connection: Any) -> None:
        if self._owner is None:
            return
        if await connection.fetchval("SELECT owner FROM ownership") != self._owner:
            raise TakenOverError


def _driver_error(error: Exception) -> BaseException:
    """The innermost cause: SQLAlchemy wraps its adapter's error, and that the driver's."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return cause
