"""The wait of a standby until the lock is free. It ends the connection of a silent owner."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock
from weft.sql.address import DatabaseAddress
from weft.sql.connections import DatabaseError, Row, Tx
from weft.sql.owners import OwnerRole
from weft.sql.store import Store
from weft.sql.takeover import OwnerSigns, SeenSigns, after_reading, is_frozen

log = get_logger("weft.standby")

LOOK_SECONDS = 0.25
"""Interval between checks of the lock and the owner's heartbeat. Waiting for the lock in a statement would need a
timeout for the check of the heartbeat, and PostgreSQL logs each timeout as an error."""
RETRY_SECONDS = 1.0

# pg_locks has the key of an advisory lock in two halves. `state_change` changes with every statement.
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


class OwnerWatch:
    """Watches the owner of a database over a separate connection."""

    def __init__(self, address: DatabaseAddress, role: OwnerRole, clock: Clock, silence_seconds: float) -> None:
        """The connection of an owner that is silent for `silence_seconds` is ended."""
        self._address = address
        self._role = role
        self._signs = _SIGNS.format(table=role.table)
        self._clock = clock
        self._silence_seconds = silence_seconds
        self._seen: SeenSigns | None = None
        self._is_away = False
        self.owner_address = ""
        """Address of the owner; empty: unknown."""
        self.on_owner: Callable[[str], None] | None = None
        """Called with `owner_address` when it changes."""

    @asynccontextmanager
    async def database(self) -> AsyncIterator[Store]:
        """Yields the database for reading while another process owns it. Raises SERVICE_UNAVAILABLE."""
        store = Store(self._address, self._role.service, application=self._role.standby_application)
        try:
            await store.connect()
        except DatabaseError as error:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, str(error)) from None
        try:
            yield store
        finally:
            await store.close()

    async def until_free(self) -> None:
        """Waits until the lock was free; a third process may have taken it. Retries while the database is down."""
        self._seen = None
        while True:
            try:
                async with self.database() as store:
                    await self._watch(store)
                    return
            except (DatabaseError, WeftError) as error:
                # Values that did not change while the database was unreachable do not mean a frozen owner.
                self._seen = None
                if not self._is_away:
                    self._is_away = True
                    log.warning("the standby cannot watch the owner", error=str(error))
            await self._clock.sleep(RETRY_SECONDS)

    async def _watch(self, store: Store) -> None:
        while not await store.attempt(self._was_free):
            await self._clock.sleep(LOOK_SECONDS)
            row = await self._read(store)
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
                await store.attempt(partial(_end, pid=row.pid, backend_start=row.backend_start))

    def _note_owner(self, address: str) -> None:
        if address != self.owner_address:
            self.owner_address = address
            if self.on_owner is not None:
                self.on_owner(address)

    def _was_free(self, tx: Tx) -> bool:
        """Tries the lock and releases it: the connection that will write has to take it."""
        if not tx.value("SELECT pg_try_advisory_lock(:key)", key=self._role.lock_key):
            return False
        tx.value("SELECT pg_advisory_unlock(:key)", key=self._role.lock_key)
        return True

    async def _read(self, store: Store) -> Row:
        try:
            return await store.attempt(lambda tx: tx.row(self._signs, key=self._role.lock_key), writes=False)
        except DatabaseError as error:
            # The owner has an earlier version, or is creating the tables.
            if error.code in _NO_HEARTBEATS:
                return None
            raise


def _end(tx: Tx, *, pid: int, backend_start: datetime) -> None:
    """Ends a connection, unless its process id has been reused."""
    tx.value(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
        "WHERE pid = :pid AND backend_start = :backend_start",
        pid=pid,
        backend_start=backend_start,
    )


_NO_HEARTBEATS = frozenset({"42P01", "42703"})
"""SQLSTATEs of a missing table and a missing column."""


def _signs_of(row: Row) -> OwnerSigns:
    return OwnerSigns(
        backend_pid=row.pid,
        sign=tuple(map(str, (row.pid, row.backend_start, row.state_change, row.beat))),
        silent_seconds=float(row.silent_seconds),
        writes_beats=row.beat_at is not None,
        has_begun=row.has_begun,
        is_working=row.is_working,
    )


def owner_watch_of(
    address: DatabaseAddress, role: OwnerRole, clock: Clock, silence_seconds: float
) -> OwnerWatch | None:
    """Returns the watch of a standby; None for SQLite, which has no standbys."""
    return None if address.is_sqlite else OwnerWatch(address, role, clock, silence_seconds)
