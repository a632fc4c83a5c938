"""Probes of attached servers: a server's models and the reader of its model list share one probe."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from runner_svc.policy.model_names import ListedModels
from weft.kernel.time.clock import Clock, SystemClock

SHARED_AGE = 0.9
"""Maximum age of a reused result, as a fraction of the probe interval. Below 1, so that a model never counts one result
as two consecutive probes."""

HEALTH, MODELS = "/health", "/v1/models"
LISTED = 200
_UNKNOWN_PATH = frozenset({404, 405, 501})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProbe:
    """A server's response to a probe."""

    status: int | None = None
    """HTTP status of the model list request; None: no response."""
    listed: ListedModels | None = None
    """Its models; None: the response contains no list."""
    health: int | None = None
    """HTTP status of its health check if it has no model list."""
    why: str = ""
    """Why there is no list, if the status does not tell."""

    @property
    def presence(self) -> int | None:
        """The status that tells whether the server is there."""
        return self.health if lacks_list(self.status) else self.status


def lacks_list(status: int | None) -> bool:
    """Whether the status means that the server has no model list, so that its health check decides."""
    return status in _UNKNOWN_PATH


@dataclass(slots=True)
class _Latest:
    probe: ServerProbe | None = None
    begun: float = 0.0
    """Monotonic start time of the probe."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a probe so that other callers wait for its result."""


class ServerProbes:
    """The latest probe of each server."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._latest: dict[tuple[str, str], _Latest] = {}
        """Keyed by address and API key, because the key may decide which models are listed."""

    async def latest(
        self, url: str, key: str, max_age_seconds: float, probe: Callable[[], Awaitable[ServerProbe]]
    ) -> ServerProbe:
        """Returns a result at most `max_age_seconds` old when the call started, or a new one from `probe`.

        With 0 s the probe starts after the call, but concurrent callers still share it.
        """
        oldest = self._clock.monotonic() - max_age_seconds
        latest = self._latest.setdefault((url, key), _Latest())
        async with latest.lock:
            if latest.probe is None or latest.begun < oldest:
                begun = self._clock.monotonic()
                latest.probe, latest.begun = await probe(), begun
            return latest.probe
