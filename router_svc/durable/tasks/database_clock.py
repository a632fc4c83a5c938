"""The time that leases are compared by: the same for all routers on one database."""

from collections.abc import Awaitable, Callable

from weft.kernel.clock import Clock

DatabaseTime = Callable[[], Awaitable[float | None]]


async def no_database_time() -> float | None:
    """A database with one router needs no time of its own."""
    return None


class DatabaseClock:
    """UTC as the database has it. Its clock is looked at now and then, and this machine's is corrected by it."""

    def __init__(self, clock: Clock, database_time: DatabaseTime = no_database_time) -> None:
        self._clock = clock
        self._database_time = database_time
        self._ahead_seconds = 0.0

    @property
    def clock(self) -> Clock:
        """For every length of time inside this process."""
        return self._clock

    def now(self) -> float:
        """UTC seconds since the epoch."""
        return self._clock.utc_now().timestamp() + self._ahead_seconds

    async def correct(self) -> None:
        """Look at the database's clock. Raises SERVICE_UNAVAILABLE."""
        theirs = await self._database_time()
        if theirs is not None:
            self._ahead_seconds = theirs - self._clock.utc_now().timestamp()
