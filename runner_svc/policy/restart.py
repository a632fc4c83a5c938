"""When a backend that died is started again."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """A crash loop is `max_deaths` deaths within `window_seconds` (the supervisors' usual 5 in 30 s)."""

    max_deaths: int = 5
    window_seconds: float = 30.0
    first_pause_seconds: float = 10.0
    """Pause after a crash loop; doubles with every further one."""
    max_pause_seconds: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartHistory:
    """What is remembered of earlier deaths. Times are seconds on any monotonic clock."""

    total: int = 0
    """Deaths ever."""
    deaths: tuple[float, ...] = ()
    """When the last ones in a row were, at most `max_deaths` of them."""
    pauses: int = 0
    """Pauses in a row so far."""

    def after_death(
        self, now: float, limits: RestartLimits, *, must_pause: bool = False
    ) -> "tuple[RestartHistory, float]":
        """The history with a death at `now`, and the pause before the next start in seconds; 0 is at once.

        `must_pause`: as if it had died too often already, for deaths that trying again at once would only repeat.
        """
        deaths = tuple(at for at in self.deaths if now - at < limits.window_seconds)
        pauses = self.pauses if deaths else 0
        deaths = (*deaths, now)[-limits.max_deaths :]
        history = replace(self, total=self.total + 1, deaths=deaths, pauses=pauses)
        if len(deaths) < limits.max_deaths and not must_pause:
            return history, 0.0
        pause = min(limits.first_pause_seconds * 2.0 ** min(pauses, _MAX_DOUBLINGS), limits.max_pause_seconds)
        # The pause itself is no proof of health: the window goes on where the next start begins.
        resumed = (now + pause,) * len(deaths)
        return replace(history, deaths=resumed, pauses=pauses + 1), pause


_MAX_DOUBLINGS = 64
"""A float does not overflow before the longest pause is reached."""
