"""How long requests waited lately, from the receipts of those that are over."""

from collections import deque

from weft.kernel.clock import Clock

WINDOW_SECONDS = 300.0
MAX_WAITS = 1024


class WaitWindow:
    """The waits of the last requests: at most MAX_WAITS of at most WINDOW_SECONDS ago."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waits: deque[tuple[float, float]] = deque(maxlen=MAX_WAITS)

    def note(self, seconds: float) -> None:
        """A request waited this long."""
        self._waits.append((self._clock.monotonic(), seconds))

    def average_ms(self) -> int | None:
        """Whole milliseconds; None: nobody came."""
        waits = self._recent()
        return round(sum(waits) / len(waits) * 1000) if waits else None

    def p95_ms(self) -> int | None:
        """What 95 of 100 did not exceed, in whole milliseconds (nearest rank); None: nobody came."""
        waits = sorted(self._recent())
        return round(waits[-(-len(waits) * 95 // 100) - 1] * 1000) if waits else None

    def _recent(self) -> list[float]:
        oldest = self._clock.monotonic() - WINDOW_SECONDS
        while self._waits and self._waits[0][0] < oldest:
            self._waits.popleft()
        return [seconds for _, seconds in self._waits]
