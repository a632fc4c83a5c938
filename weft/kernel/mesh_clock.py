"""The mesh's time of day on a machine whose own clock may be off."""

from datetime import datetime, timedelta

from weft.kernel.clock import Clock


class MeshClock:
    """See weft.kernel.clock.Clock. Shows the time of day of `clock` until it is told the mesh's.

    It goes on from there by the monotonic clock, so that a correction of the machine's own does not move it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told: tuple[datetime, float] | None = None

    def set(self, now: datetime) -> None:
        """It is `now` in the mesh, an aware time in UTC."""
        self._told = now, self._clock.monotonic()

    def monotonic(self) -> float:
        """See Clock.monotonic."""
        return self._clock.monotonic()

    def utc_now(self) -> datetime:
        """See Clock.utc_now."""
        if self._told is None:
            return self._clock.utc_now()
        told, at = self._told
        return told + timedelta(seconds=self._clock.monotonic() - at)

    async def sleep(self, seconds: float) -> None:
        """See Clock.sleep."""
        await self._clock.sleep(seconds)
