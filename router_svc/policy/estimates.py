"""What loads and requests usually take, learned from those that are over.

Everything works without a measurement: what was never measured is None, or a default that has a name. All times in
seconds. Averages are exponential: of the last few measurements, each newer one counts for more.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from router_svc.policy.arrival import Arrival
from router_svc.policy.candidates import Candidate
from router_svc.policy.decisions import Served

NEWEST_SHARE = 0.3
"""What the newest measurement counts for in its average: after six, the first counts for a twentieth."""
DEFAULT_OUTPUT_TOKENS = 256.0
"""Expected of a request that names no maximum, of a kind that was never seen."""
DEFAULT_TOKENS_PER_SECOND = 30.0
"""Of one request on a model that was never measured: about what an 8B model does on a small GPU."""
MIN_TOKENS_PER_SECOND = 0.1
MAX_OUTPUT_TOKENS = 1_000_000
MAX_EVICTION_SECONDS = 10.0
"""What ending the backends of those that give way, seeing their memory back and hearing of it add to a load."""
MAX_MEASURED_SECONDS = 86_400.0
"""A longer time is not a measurement."""
MAX_MEASURED_MODELS = 16_384
"""Models on hosts of which figures are kept; those that were not used for the longest time are forgotten."""
MAX_MEASURED_KINDS = 65_536
"""Pools and tenants together of which answer lengths are kept."""

Place = tuple[str, str]
"""A model on a host: the same model is not equally fast everywhere."""
_Key = TypeVar("_Key", bound=Hashable)


class Averages(Generic[_Key]):
    """A bounded table of exponential averages; the one that was noted least recently is forgotten first."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._averages: OrderedDict[_Key, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._averages)

    def get(self, key: _Key) -> float | None:
        """None: never noted, or forgotten."""
        return self._averages.get(key)

    def note(self, key: _Key, measured: float) -> None:
        """One more measurement."""
        known = self._averages.get(key)
        if known is not None:
            self._averages[key] = known + NEWEST_SHARE * (measured - known)
            self._averages.move_to_end(key)
            return
        self._averages[key] = measured
        if len(self._averages) > self._max_entries:
            self._averages.popitem(last=False)


@dataclass(slots=True)
class _Speed:
    """How fast requests are served at one place; averages."""

    service_seconds: float
    token_seconds: float
    first_content_seconds: float | None
    """None: never measured."""

    def note(self, seconds: float, token_seconds: float, first_content_seconds: float | None) -> None:
        """One more request was served."""
        self.service_seconds += NEWEST_SHARE * (seconds - self.service_seconds)
        self.token_seconds += NEWEST_SHARE * (token_seconds - self.token_seconds)
        if first_content_seconds is not None:
            known = first_content_seconds if self.first_content_seconds is None else self.first_content_seconds
            self.first_content_seconds = known + NEWEST_SHARE * (first_content_seconds - known)


class Estimates:
    """Learns from what is over; all methods are O(1)."""

    def __init__(self) -> None:
        self._load_seconds: Averages[Place] = Averages(MAX_MEASURED_MODELS)
        self._speeds: OrderedDict[Place, _Speed] = OrderedDict()
        """The one that was noted least recently is forgotten first."""
        self._output_tokens: Averages[tuple[str, str]] = Averages(MAX_MEASURED_KINDS)
        self._pool_output_tokens: Averages[str] = Averages(MAX_MEASURED_MODELS)

    def note_load(self, candidate: Candidate, seconds: float) -> None:
        """A load from nothing took this long, from its order until it took requests.

        Where its runner says how long the engine takes, a wait for memory inside of the load does not count.
        """
        if not _is_measurement(seconds):
            return
        if candidate.usual_load_seconds is not None:
            seconds = min(seconds, candidate.usual_load_seconds + MAX_EVICTION_SECONDS)
        self._load_seconds.note(_place(candidate), seconds)

    def load_seconds(self, candidate: Candidate) -> float | None:
        """How long a load takes: as measured here, else by its runner's word; None: nobody knows."""
        measured = self._load_seconds.get(_place(candidate))
        return candidate.usual_load_seconds if measured is None else measured

    def note_served(
        self,
        candidate: Candidate,
        tenant: str,
        served: Served,
        seconds: float,
        first_content_seconds: float | None = None,
    ) -> None:
        """A request was served in this time, `first_content_seconds` of it before its first content (None: unknown)."""
        if not _is_measurement(seconds) or served.output_tokens <= 0:
            return
        tokens = float(min(served.output_tokens, MAX_OUTPUT_TOKENS))
        self._note_speed(_place(candidate), seconds, first_content_seconds, tokens)
        self._output_tokens.note((candidate.pool, tenant), tokens)
        self._pool_output_tokens.note(candidate.pool, tokens)

    def output_tokens(self, pool: str, tenant: str, limit: int | None) -> float:
        """How many tokens an answer of this pool to this tenant has, at most `limit` (None: it names none)."""
        expected = self._output_tokens.get((pool, tenant))
        if expected is None:
            expected = self._pool_output_tokens.get(pool)
        if expected is None:
            expected = DEFAULT_OUTPUT_TOKENS
        return expected if limit is None else min(expected, float(max(limit, 1)))

    def tokens_per_second(self, candidate: Candidate) -> float:
        """How fast one request is answered there once its answer has begun."""
        speed = self._speeds.get(_place(candidate))
        if speed is None:
            return DEFAULT_TOKENS_PER_SECOND
        seconds = speed.token_seconds
        return max(MIN_TOKENS_PER_SECOND, 1.0 / seconds) if seconds > 0 else 1.0 / _SHORTEST_TOKEN_SECONDS

    def service_seconds(self, candidate: Candidate, arrival: Arrival) -> float | None:
        """How long this request would take there from its grant to its end; None: nothing was measured there."""
        speed = self._speeds.get(_place(candidate))
        if speed is None:
            return None
        first = speed.first_content_seconds or 0.0
        tokens = self.output_tokens(candidate.pool, arrival.tenant, arrival.max_output_tokens)
        return first + speed.token_seconds * tokens

    def mean_service_seconds(self, candidate: Candidate) -> float | None:
        """How long a request takes there, whatever it asks; None: nothing was measured there."""
        speed = self._speeds.get(_place(candidate))
        return None if speed is None else speed.service_seconds

    def _note_speed(self, place: Place, seconds: float, first: float | None, tokens: float) -> None:
        if first is not None:
            first = min(max(first, 0.0), seconds)
        token_seconds = (seconds - (first or 0.0)) / tokens
        speed = self._speeds.get(place)
        if speed is not None:
            speed.note(seconds, token_seconds, first)
            self._speeds.move_to_end(place)
            return
        self._speeds[place] = _Speed(seconds, token_seconds, first)
        if len(self._speeds) > MAX_MEASURED_MODELS:
            self._speeds.popitem(last=False)


def wait_seconds(ahead: int, slots: int, mean_service_seconds: float | None) -> float | None:
    """How long a slot is awaited with so many ahead in the line and all `slots` busy.

    None: unknown, because nothing was measured or there are no slots. The first in line waits for the first of `slots`
    that run, which on average are half done.
    """
    if mean_service_seconds is None or slots <= 0:
        return None
    return (ahead + 0.5) * mean_service_seconds / slots


_SHORTEST_TOKEN_SECONDS = 1e-6


def _place(candidate: Candidate) -> Place:
    # Where its host is not known, its runner tells two places apart.
    return (candidate.model, candidate.host or candidate.runner)


def _is_measurement(seconds: float) -> bool:
    return 0.0 <= seconds <= MAX_MEASURED_SECONDS
