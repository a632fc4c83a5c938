"""How long a dial-out runner waits before it dials again."""

from dataclasses import dataclass

MAX_DOUBLINGS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RedialLimits:
    """Bounds of the wait."""

    first_seconds: float = 0.5
    """Most a first wait may take."""
    max_seconds: float = 30.0
    """Most any wait may take."""
    min_seconds: float = 0.05
    """Least any wait takes: a peer that ends each link at once is not called in a tight loop."""
    steady_seconds: float = 10.0
    """A session that stood for so long counts as a success."""


class RedialPolicy:
    """Exponential back-off with full jitter: a mesh that comes back is not stormed by all its runners at once."""

    def __init__(self, limits: RedialLimits | None = None) -> None:
        self._limits = limits or RedialLimits()
        self._failures = 0

    def failed(self, sample: float) -> float:
        """An attempt failed or a link was lost: seconds to wait. `sample` is random, from 0 up to 1."""
        ceiling = self._limits.first_seconds * 2.0 ** min(self._failures, MAX_DOUBLINGS)
        self._failures += 1
        wait: float = sample * min(ceiling, self._limits.max_seconds)
        return max(self._limits.min_seconds, wait)

    def ended(self, stood_seconds: float) -> None:
        """A session was open for so long; if that was long enough, the next failure is a first one again.

        Two runners that take each other's place, by a copied session file, do not do so ever faster.
        """
        if stood_seconds >= self._limits.steady_seconds:
            self._failures = 0
