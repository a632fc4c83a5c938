"""How fast a line is served while somebody waits in it."""

import math

AVERAGE_WEIGHT = 0.1
"""Share of the newest wait in the average."""
MIN_STEADY_GRANTS = 8.0
"""Grants of a backlogged line, older ones faded, below which their pace is chance."""


class Pace:
    """Grants per second of one line while it is backlogged, and how long those who were granted had waited."""

    def __init__(self, window_seconds: float) -> None:
        self._window = window_seconds
        self._count = 0.0
        self._counted_at = 0.0
        self._backlogged_since: float | None = None
        self.average_wait_seconds: float | None = None

    def note_backlog(self, now: float, *, waiting: bool) -> None:
        """Somebody waits, or nobody does any more."""
        if not waiting:
            self._backlogged_since = None
        elif self._backlogged_since is None:
            self._backlogged_since = self._counted_at = now
            self._count = 0.0

    def note_grant(self, waited_seconds: float, now: float) -> None:
        """One who had waited this long was granted a slot; 0: it did not have to wait."""
        average = self.average_wait_seconds
        self.average_wait_seconds = (
            waited_seconds if average is None else average + AVERAGE_WEIGHT * (waited_seconds - average)
        )
        if self._backlogged_since is not None:
            self._count = self._decayed(now) + 1.0
            self._counted_at = now

    def backlogged_seconds(self, now: float) -> float:
        """For how long somebody has waited without a break."""
        return 0.0 if self._backlogged_since is None else now - self._backlogged_since

    def grants_per_second(self, now: float) -> float | None:
        """None: nobody waits, or nobody was granted anything since somebody does."""
        since = self._backlogged_since
        if since is None or not self._count or now <= since:
            return None
        seen = self._window * -math.expm1((since - now) / self._window)
        return self._decayed(now) / seen

    def is_steady(self, now: float) -> bool:
        """Whether so many were granted a slot while somebody waited that their pace says something."""
        return self._backlogged_since is not None and self._decayed(now) >= MIN_STEADY_GRANTS

    def _decayed(self, now: float) -> float:
        return self._count * math.exp((self._counted_at - now) / self._window)
