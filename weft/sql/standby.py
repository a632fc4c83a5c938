"""The wait of a standby for its turn: until the lock is free, or the silent owner's connection was ended."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import URL, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason
from weft.sql.database import url_of
from weft.sql.owned_postgres import OwnerRole, PostgresOwner, new_engine
from weft.sql.takeover import OwnerSigns, SeenSigns, after_reading, is_frozen

log = get_logger("weft.standby")

LOOK_SECONDS = 0.25
"""Pause between two looks at the lock and the owner's heartbeat. A statement that waited for the lock would need a
timeout for the look in between, and PostgreSQL logs each of those as an error."""
RETRY_SECONDS = 1.0

_READ_ONLY = text("SET TRANSACTION READ ONLY")
_LOCK = text("SELECT pg_try_advisory_lock(:key)")
_UNLOCK = text("SELECT pg_advisory_unlock(:key)")
# One advisory lock has its number in two halves. `state_change` changes with every statement of a connection.
_SIGNS = """
    SELECT a.pid, a.backend_start, a.state_change, o.address, o.beat, o.beat_at,
      coalesce(o.backend_pid = a.pid AND o.beat_at >= a.backend_start, false) AS has_begun,
      coalesce(a.state = 'active' AND a.wait_event_type IS DISTINCT FROM 'Client', false) AS is_working,
      extract(epoch FROM clock_timestamp() - greatest(a.state_change, a.backend_start, o.beat_at)) AS silent_seconds
    FROM pg_locks l
    JOIN pg_stat_activity a ON a.pid = l.pid
    LEFT JOIN {table} o ON true
    WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND ((l.classid::bigint << 32) | l.objid::bigint) = :key
    """
# Of a process id that was given to another connection since, nothing is ended.
_END = text(
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid = :pid AND backend_start = :backend_start"
)


class StandbyReads:
    """Reads of a database that another process owns."""

    def __init__(self, url: URL, role: OwnerRole) -> None:
        self._url = url
        self._role = role
        driver = PostgresOwner(url, role)
        self._failures: tuple[type[Exception], ...] = (SQLAlchemyError, OSError, *driver.driver_errors)
        self._explain = driver.explain

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        """One transaction that writes nothing. Raises SERVICE_UNAVAILABLE, also for tables of another version."""
        engine = new_engine(self._url, self._role.standby_application)
        try:
            async with engine.begin() as connection:
                await connection.execute(_READ_ONLY)
                yield connection
        except self._failures as error:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, self._explain(error)) from None
        finally:
            with suppress(*self._failures):
                await engine.dispose()


class OwnerWatch:
    """Watches the owner of a database from a connection of its own."""

    def __init__(self, url: URL, role: OwnerRole, clock: Clock, silence_seconds: float) -> None:
        """`silence_seconds`: how long an owner may be silent before its connection is ended."""
        self._url = url
        self._role = role
        self._signs = text(_SIGNS.format(table=role.table.name))
        self._clock = clock
        self._silence_seconds = silence_seconds
        driver = PostgresOwner(url, role)
        self._failures: tuple[type[Exception], ...] = (SQLAlchemyError, OSError, *driver.driver_errors)
        self._explain = driver.explain
        self.reads = StandbyReads(url, role)
        """Reads of the database while another process owns it."""
        self._seen: SeenSigns | None = None
        self._is_away = False
        self.owner_address = ""
        """Where the owner serves, as far as it is known."""
        self.on_owner: Callable[[str], None] | None = None
        """Called with `owner_address` when it has changed."""

    async def until_free(self) -> None:
        """Returns once the lock was free; by then a third process may have taken it.

        A database that does not answer is asked again until it does.
        """
        self._seen = None
        while True:
            engine = new_engine(self._url, self._role.standby_application)
            try:
                async with engine.connect() as connection:
                    await connection.execution_options(isolation_level="AUTOCOMMIT")
                    await self._watch(connection)
                    return
            except self._failures as error:
                # What stood still while the database was away is no sign of a frozen owner.
                self._seen = None
                if not self._is_away:
                    self._is_away = True
                    log.warning("the standby cannot watch the owner", error=self._explain(error))
            finally:
                with suppress(*self._failures):
                    await engine.dispose()
            await self._clock.sleep(RETRY_SECONDS)

    async def _watch(self, connection: AsyncConnection) -> None:
        while not await self._was_free(connection):
            await self._clock.sleep(LOOK_SECONDS)
            row = await self._read(connection)
            if self._is_away:
                self._is_away = False
                log.info("the standby watches the owner again")
            if row is None:
                self._seen = None
                continue
            self._note_owner(row.address or "")
            now = self._clock.monotonic()
            self._seen = after_reading(self._seen, _signs_of(row), now)
            if is_frozen(self._seen, now, self._silence_seconds):
                log.warning(
                    "the owner of the database is silent: its connection is ended",
                    owner=self.owner_address,
                    silent_seconds=round(self._seen.signs.silent_seconds, 1),
                )
                self._seen = None
                await connection.execute(_END, {"pid": row.pid, "backend_start": row.backend_start})

    def _note_owner(self, address: str) -> None:
        if address != self.owner_address:
            self.owner_address = address
            if self.on_owner is not None:
                self.on_owner(address)

    async def _was_free(self, connection: AsyncConnection) -> bool:
        """Tries the lock, and gives it back: it is of use on the connection that writes alone."""
        if not (await connection.execute(_LOCK, {"key": self._role.lock_key})).scalar_one():
            return False
        await connection.execute(_UNLOCK, {"key": self._role.lock_key})
        return True

    async def _read(self, connection: AsyncConnection) -> Any | None:
        try:
            return (await connection.execute(self._signs, {"key": self._role.lock_key})).first()
        except SQLAlchemyError as error:
            # The owner is of an earlier version, or makes the tables right now.
            if getattr(error.__cause__, "sqlstate", None) in _NO_HEARTBEATS:
                return None
            raise


_NO_HEARTBEATS = frozenset({"42P01", "42703"})
"""SQLSTATEs of a missing table and of a missing column."""


def _signs_of(row: Any) -> OwnerSigns:
    return OwnerSigns(
        backend_pid=row.pid,
        sign=tuple(map(str, (row.pid, row.backend_start, row.state_change, row.beat))),
        silent_seconds=float(row.silent_seconds),
        writes_beats=row.beat_at is not None,
        has_begun=row.has_begun,
        is_working=row.is_working,
    )


def owner_watch_of(
    database_url: str | Path | URL, role: OwnerRole, clock: Clock, silence_seconds: float
) -> OwnerWatch | None:
    """Returns the watch of a standby; None for a database that only processes of one machine open."""
    url = database_url if isinstance(database_url, URL) else url_of(database_url)
    return OwnerWatch(url, role, clock, silence_seconds) if url.get_backend_name() == "postgresql" else None
