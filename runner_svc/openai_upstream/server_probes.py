"""Probes of attached servers: one per server, whose result its models and the reader of its model list share."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from runner_svc.policy.model_names import ListedModels
from weft.kernel.clock import Clock, SystemClock

SHARED_AGE = 0.9
"""Largest age of a result that is used again, as a share of the probe interval. Below 1, so that no model takes one
result for two probes in a row."""

LISTED = 200
_UNKNOWN_PATH = frozenset({404, 405, 501})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProbe:
    """What a server answered."""

    status: int | None = None
    """HTTP status of the answer to the request for its models; None: it did not answer."""
    listed: ListedModels | None = None
    """Its models; None: it answered with no list of them."""
    health: int | None = None
    """HTTP status of its health check, where it has no list."""
    why: str = ""
    """Why there is no list, where the status does not say it."""

    @property
    def presence(self) -> int | None:
        """The status that says whether it is there."""
        return self.health if lacks_list(self.status) else self.status


def lacks_list(status: int | None) -> bool:
    """Whether a server with this status has no list of models, so that its health check decides."""
    return status in _UNKNOWN_PATH


@dataclass(slots=True)
class _Latest:
    probe: ServerProbe | None = None
    begun: float = 0.0
    """Monotonic time at which the probe began."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a probe, so that others wait for its result."""


class ServerProbes:
    """The latest probe of each server of one runner."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._latest: dict[tuple[str, str], _Latest] = {}
        """By address and key: another key may see other models."""

    async def latest(
        self, url: str, key: str, max_age_seconds: float, probe: Callable[[], Awaitable[ServerProbe]]
    ) -> ServerProbe:
        """Returns the result of a probe that began at most so long before this call; `probe` makes a new one.

        With 0 s the probe began after the call; several callers at the same time still share it.
        """
        oldest = self._clock.monotonic() - max_age_seconds
        latest = self._latest.setdefault((url, key), _Latest())
        async with latest.lock:
            if latest.probe is None or latest.begun < oldest:
                begun = self._clock.monotonic()
                latest.probe, latest.begun = await probe(), begun
            return latest.probe
