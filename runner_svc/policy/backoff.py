"""How long to wait before the next try."""

from dataclasses import dataclass

FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 5.0
MAX_DOUBLINGS = 16


def retry_pause_seconds(failures: int, jitter: float) -> float:
    """The pause after that many failures in a row; `jitter` (0 to 1) places it between one half of it and all of it.

    Without jitter a thousand runners would come back to a registry in the same moment.
    """
    doublings = max(0, min(failures - 1, MAX_DOUBLINGS))
    full = min(FIRST_PAUSE_SECONDS * (1 << doublings), MAX_PAUSE_SECONDS)
    return full * (0.5 + jitter / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedialLimits:
    """Bounds of the wait."""

    first_seconds: float = 0.5
    """Most a first wait may take."""
    max_seconds: float = 30.0
    """Most any wait may take."""
    min_seconds: float = 0.05
    """Least any wait takes: a peer that ends each link at once is not called in a tight loop."""
    share_of_absence: float = 0.5
    """Most a wait may take, as a share of the time since the last success. The peer that is back is found within that
    share of its absence; the number of attempts grows with the logarithm of the absence."""
    success_seconds: float = 0.5
    """A session that was registered and stood for so long is a success."""
    steady_seconds: float = 10.0
    """A session that ended because another one took its place is a success only if it stood for so long."""


class RedialPolicy:
    """Back-off with full jitter that grows with the time since the last success, and begins anew with each success.

    Full jitter: a mesh that comes back is not stormed by all its runners at once. A success is a session that was
    registered over the link and stood for a moment; a connection that was merely made is none. So a link that is up and
    down by turns is dialled soon after each loss. Times are seconds on any monotonic clock.
    """

    def __init__(self, now: float, limits: RedialLimits | None = None) -> None:
        """`now`: when dialling begins."""
        self._limits = limits or RedialLimits()
        self._success_at = now

    def failed(self, sample: float, now: float) -> float:
        """An attempt failed or a link was lost: seconds to wait. `sample` is random, from 0 up to 1."""
        limits = self._limits
        ceiling = max(limits.first_seconds, limits.share_of_absence * (now - self._success_at))
        return max(limits.min_seconds, sample * min(ceiling, limits.max_seconds))

    def ended(self, stood_seconds: float, now: float, *, replaced: bool = False) -> None:
        """A registered session ended now, after so long; `replaced`: because another one took its place.

        Two runners that take each other's place, by a copied session file, do not do so ever faster.
        """
        needed = self._limits.steady_seconds if replaced else self._limits.success_seconds
        if stood_seconds >= needed:
            self._success_at = now
