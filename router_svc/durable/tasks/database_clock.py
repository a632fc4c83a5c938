"""The database clock: the time by which all routers on one database compare leases."""

from collections.abc import Awaitable, Callable

from weft.kernel.clock import Clock

DatabaseTime = Callable[[], Awaitable[float | None]]


async def no_database_time() -> float | None:
    """Returns None: a database with one router needs no common clock."""
    return None


class DatabaseClock:
    """UTC of the database: this machine's clock plus an offset that `synchronize` measures."""

    def __init__(self, clock: Clock, database_time: DatabaseTime = no_database_time) -> None:
        self._clock = clock
        self._database_time = database_time
        self._offset_seconds = 0.0

    @property
    def clock(self) -> Clock:
        """The process clock, for durations inside this process."""
        return self._clock

    def now(self) -> float:
        """Returns UTC seconds since the epoch."""
        return self._clock.utc_now().timestamp() + self._offset_seconds

    async def synchronize(self) -> None:
        """Measures the offset to the database's clock. Raises SERVICE_UNAVAILABLE."""
        database_seconds = await self._database_time()
        if database_seconds is not None:
            self._offset_seconds = database_seconds - self._clock.utc_now().timestamp()
