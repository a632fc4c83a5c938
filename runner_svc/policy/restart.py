"""Restart policy of backends: crash loops and their pauses."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """The limits of a crash loop: `max_deaths` within `window_seconds` (5 in 30 s, as is usual for supervisors)."""

    max_deaths: int = 5
    window_seconds: float = 30.0
    first_pause_seconds: float = 10.0
    """Pause after the first crash loop; doubles with every further one."""
    max_pause_seconds: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartHistory:
    """The history of deaths. Times are seconds on any monotonic clock."""

    total: int = 0
    """Total number of deaths."""
    deaths: tuple[float, ...] = ()
    """Times of the last deaths in a row, at most `max_deaths` of them."""
    pauses: int = 0
    """Number of pauses in a row."""

    def after_death(
        self, now: float, limits: RestartLimits, *, must_pause: bool = False
    ) -> "tuple[RestartHistory, float]":
        """Returns the history with a death at `now`, and the pause before the next start in seconds; 0: none.

        `must_pause`: pause in any case, for deaths that an immediate start would repeat.
        """
        deaths = tuple(at for at in self.deaths if now - at < limits.window_seconds)
        pauses = self.pauses if deaths else 0
        deaths = (*deaths, now)[-limits.max_deaths :]
        history = replace(self, total=self.total + 1, deaths=deaths, pauses=pauses)
        if len(deaths) < limits.max_deaths and not must_pause:
            return history, 0.0
        pause = min(limits.first_pause_seconds * 2.0 ** min(pauses, _MAX_DOUBLINGS), limits.max_pause_seconds)
        # The pause itself does not count as health: the window continues with the next start.
        resumed = (now + pause,) * len(deaths)
        return replace(history, deaths=resumed, pauses=pauses + 1), pause


_MAX_DOUBLINGS = 64
"""A float does not overflow before the longest pause is reached."""
