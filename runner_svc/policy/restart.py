"""When a backend that died is started again."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """A crash loop is `max_deaths` deaths within `window_seconds` (the supervisors' usual 5 in 30 s)."""

    max_deaths: int = 5
    window_seconds: float = 30.0
    first_pause_seconds: float = 10.0
    """Pause after a crash loop; doubles with every further one."""
    max_pause_seconds: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartDecision:
    """What to do after a death."""

    pause_seconds: float
    """0: start again at once."""
    crash_loop: bool


@dataclass(slots=True)
class RestartPolicy:
    """Counts deaths. Times are seconds on any monotonic clock."""

    limits: RestartLimits = field(default_factory=RestartLimits)
    total: int = 0
    _deaths: list[float] = field(default_factory=list)
    _loops: int = 0

    def died(self, now: float) -> RestartDecision:
        """The decision after a death at `now`: at once, or after a pause when it died too often in a row."""
        self.total += 1
        recent = [at for at in self._deaths if now - at < self.limits.window_seconds]
        if not recent:
            self._loops = 0
        self._deaths = [*recent, now]
        if len(self._deaths) < self.limits.max_deaths:
            return RestartDecision(pause_seconds=0.0, crash_loop=False)
        pause = min(self.limits.first_pause_seconds * 2**self._loops, self.limits.max_pause_seconds)
        self._loops += 1
        return RestartDecision(pause_seconds=pause, crash_loop=True)
