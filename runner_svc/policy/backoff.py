"""Back-off: pauses before retries and before dialing again."""

from dataclasses import dataclass

FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 5.0
MAX_DOUBLINGS = 16


def retry_pause_seconds(failures: int, jitter: float) -> float:
    """Returns the pause after a number of failures in a row; `jitter` (0 to 1) places it between half of it and all.

    Without jitter a thousand runners would reconnect to a registry at the same time.
    """
    doublings = max(0, min(failures - 1, MAX_DOUBLINGS))
    full = min(FIRST_PAUSE_SECONDS * (1 << doublings), MAX_PAUSE_SECONDS)
    return full * (0.5 + jitter / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedialLimits:
    """Limits of the back-off of dialing."""

    first_seconds: float = 0.5
    """Maximum of a first pause."""
    max_seconds: float = 30.0
    """Maximum of any pause."""
    min_seconds: float = 0.05
    """Minimum of any pause: a peer that ends each link at once is not dialed in a tight loop."""
    share_of_absence: float = 0.5
    """Maximum of a pause, as a share of the time since the last success. A peer that is back is found within that share
    of its absence; the number of attempts grows with the logarithm of the absence."""
    success_seconds: float = 0.5
    """Minimum duration of a registered session that counts as a success."""
    steady_seconds: float = 10.0
    """Minimum duration of a session that was replaced by another one to count as a success."""


class RedialPolicy:
    """Back-off with full jitter that grows with the time since the last success, and is reset by each success.

    Full jitter spreads the reconnects of all runners after an outage. A success is a session that was registered over
    the link and lasted for a moment; a mere connection is none. So a flapping link is dialed soon after each loss.
    Times are seconds on any monotonic clock.
    """

    def __init__(self, now: float, limits: RedialLimits | None = None) -> None:
        """`now`: time of the first attempt."""
        self._limits = limits or RedialLimits()
        self._success_at = now

    def failed(self, sample: float, now: float) -> float:
        """Returns the pause after a failed attempt or a lost link. `sample` is random, from 0 up to 1."""
        limits = self._limits
        ceiling = max(limits.first_seconds, limits.share_of_absence * (now - self._success_at))
        return max(limits.min_seconds, sample * min(ceiling, limits.max_seconds))

    def ended(self, stood_seconds: float, now: float, *, replaced: bool = False) -> None:
        """Record the end of a registered session; `replaced`: another one took its place.

        Two runners that replace each other, with a copied session file, do so at a bounded rate.
        """
        needed = self._limits.steady_seconds if replaced else self._limits.success_seconds
        if stood_seconds >= needed:
            self._success_at = now
