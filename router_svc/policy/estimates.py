"""What loads and requests usually take, learned from those that are over.

Everything works without a measurement: what was never measured is None, or a default that has a name. All times in
seconds. Averages are exponential: of the last few measurements, each newer one counts for more.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from router_svc.policy.arrival import Arrival
from router_svc.policy.decisions import Served
from router_svc.policy.endpoints.candidates import Candidate

NEWEST_SHARE = 0.3
"""What the newest measurement counts for in its average: after six, the first counts for a twentieth."""
DEFAULT_OUTPUT_TOKENS = 256.0
"""Expected of a request that names no maximum, of a kind that was never seen."""
DEFAULT_TOKENS_PER_SECOND = 30.0
"""Of one request on a model that was never measured: about what an 8B model does on a small GPU."""
PRIOR_ANSWERS = 8
"""Answers of DEFAULT_OUTPUT_TOKENS that are counted beside those that were measured, where it is asked how long an
answer that names a maximum may become: a few short answers say little about one that asks for many tokens."""
MAX_COUNTED_ANSWERS = 64
"""Answers of a pool that count for its usual length; older ones fade."""
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

ModelHost = tuple[str, str]
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
    between_tokens_seconds: float | None
    """From one token to the next; None: never measured."""

    def note(
        self,
        seconds: float,
        token_seconds: float,
        first_content_seconds: float | None,
        between_tokens_seconds: float | None,
    ) -> None:
        """One more request was served."""
        self.service_seconds += NEWEST_SHARE * (seconds - self.service_seconds)
        self.token_seconds += NEWEST_SHARE * (token_seconds - self.token_seconds)
        if first_content_seconds is not None:
            known = first_content_seconds if self.first_content_seconds is None else self.first_content_seconds
            self.first_content_seconds = known + NEWEST_SHARE * (first_content_seconds - known)
        if between_tokens_seconds is not None:
            paused = self.between_tokens_seconds
            known = between_tokens_seconds if paused is None else paused
            self.between_tokens_seconds = known + NEWEST_SHARE * (between_tokens_seconds - known)


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast one request is served at one place."""

    first_content_seconds: float
    """0: not known."""
    token_seconds: float

    def seconds_of(self, tokens: float) -> float:
        """How long an answer of so many tokens takes from its grant to its end."""
        return self.first_content_seconds + self.token_seconds * tokens


@dataclass(slots=True)
class _Lengths:
    """How long answers of a pool become by themselves."""

    tokens: float = 0.0
    """Of all answers that count ..."""
    ended: float = 0.0
    """... and how many of them ended before the maximum that they were given. One that was cut off there says only that
    it would have been longer: its tokens count and its end does not."""

    def note(self, tokens: float, *, was_cut: bool) -> None:
        kept = 1.0 - 1.0 / MAX_COUNTED_ANSWERS
        self.tokens = self.tokens * kept + tokens
        self.ended = self.ended * kept + (not was_cut)

    @property
    def usual(self) -> float:
        return (PRIOR_ANSWERS * DEFAULT_OUTPUT_TOKENS + self.tokens) / (PRIOR_ANSWERS + self.ended)


class Estimates:
    """Learns from what is over; all methods are O(1)."""

    def __init__(self) -> None:
        self._load_seconds: Averages[ModelHost] = Averages(MAX_MEASURED_MODELS)
        self._speeds: OrderedDict[ModelHost, _Speed] = OrderedDict()
        """The one that was noted least recently is forgotten first."""
        self._output_tokens: Averages[tuple[str, str]] = Averages(MAX_MEASURED_KINDS)
        self._pool_output_tokens: Averages[str] = Averages(MAX_MEASURED_MODELS)
        self._lengths: OrderedDict[str, _Lengths] = OrderedDict()
        """By pool; the one that was noted least recently is forgotten first."""

    def note_load(self, candidate: Candidate, seconds: float) -> None:
        """A load from nothing took this long, from its order until it took requests.

        Where its runner says how long the engine takes, a wait for memory inside of the load does not count.
        """
        if not _is_measurement(seconds):
            return
        if candidate.usual_load_seconds is not None:
            seconds = min(seconds, candidate.usual_load_seconds + MAX_EVICTION_SECONDS)
        self._load_seconds.note(_model_host(candidate), seconds)

    def load_seconds(self, candidate: Candidate) -> float | None:
        """How long a load takes: as measured here, else by its runner's word; None: nobody knows."""
        measured = self._load_seconds.get(_model_host(candidate))
        return candidate.usual_load_seconds if measured is None else measured

    def note_served(
        self,
        candidate: Candidate,
        tenant: str,
        served: Served,
        seconds: float,
        first_content_seconds: float | None = None,
        limit: int | None = None,
    ) -> None:
        """A request was served in this time, `first_content_seconds` of it before its first content (None: unknown).

        `limit`: how many tokens it asked for at most; None: it named no maximum.
        """
        if not _is_measurement(seconds) or served.output_tokens <= 0:
            return
        tokens = float(min(served.output_tokens, MAX_OUTPUT_TOKENS))
        self._note_speed(_model_host(candidate), seconds, first_content_seconds, tokens)
        self._output_tokens.note((candidate.pool, tenant), tokens)
        self._pool_output_tokens.note(candidate.pool, tokens)
        self._note_length(candidate.pool, tokens, was_cut=limit is not None and tokens >= limit)

    def output_tokens(self, pool: str, tenant: str, limit: int | None) -> float:
        """How many tokens an answer of this pool to this tenant has, at most `limit` (None: it names none)."""
        expected = self._output_tokens.get((pool, tenant))
        if expected is None:
            expected = self._pool_output_tokens.get(pool)
        if expected is None:
            expected = DEFAULT_OUTPUT_TOKENS
        return expected if limit is None else min(expected, float(max(limit, 1)))

    def expected_tokens(self, pool: str, tenant: str, limit: int | None) -> float:
        """How many tokens to reckon with where too few would be a false promise: what was asked for, within the usual.

        The usual length is that at which answers ended by themselves; see PRIOR_ANSWERS.
        """
        measured = self.output_tokens(pool, tenant, None)
        if limit is None:
            return measured
        lengths = self._lengths.get(pool)
        usual = max(measured, DEFAULT_OUTPUT_TOKENS if lengths is None else lengths.usual)
        return min(float(max(limit, 1)), usual)

    def speed(self, candidate: Candidate) -> Speed | None:
        """How fast one request is served there; None: nothing was measured there."""
        speed = self._speeds.get(_model_host(candidate))
        if speed is None:
            return None
        between = speed.token_seconds if speed.between_tokens_seconds is None else speed.between_tokens_seconds
        return Speed(speed.first_content_seconds or 0.0, between)

    def tokens_per_second(self, candidate: Candidate) -> float:
        """How fast one request is answered there once its answer has begun."""
        speed = self._speeds.get(_model_host(candidate))
        if speed is None:
            return DEFAULT_TOKENS_PER_SECOND
        seconds = speed.token_seconds
        return max(MIN_TOKENS_PER_SECOND, 1.0 / seconds) if seconds > 0 else 1.0 / _SHORTEST_TOKEN_SECONDS

    def service_seconds(self, candidate: Candidate, arrival: Arrival) -> float | None:
        """How long this request would take there from its grant to its end; None: nothing was measured there."""
        speed = self._speeds.get(_model_host(candidate))
        if speed is None:
            return None
        first = speed.first_content_seconds or 0.0
        tokens = self.output_tokens(candidate.pool, arrival.tenant, arrival.max_output_tokens)
        return first + speed.token_seconds * tokens

    def mean_service_seconds(self, candidate: Candidate) -> float | None:
        """How long a request takes there, whatever it asks; None: nothing was measured there."""
        speed = self._speeds.get(_model_host(candidate))
        return None if speed is None else speed.service_seconds

    def _note_length(self, pool: str, tokens: float, *, was_cut: bool) -> None:
        lengths = self._lengths.setdefault(pool, _Lengths())
        self._lengths.move_to_end(pool)
        lengths.note(tokens, was_cut=was_cut)
        if len(self._lengths) > MAX_MEASURED_MODELS:
            self._lengths.popitem(last=False)

    def _note_speed(self, model_host: ModelHost, seconds: float, first: float | None, tokens: float) -> None:
        if first is not None:
            first = min(max(first, 0.0), seconds)
        token_seconds = (seconds - (first or 0.0)) / tokens
        # The first token ends the time to the first content: so many tokens have one pause less between them.
        between = None if first is None or tokens < 2 else (seconds - first) / (tokens - 1)
        speed = self._speeds.get(model_host)
        if speed is not None:
            speed.note(seconds, token_seconds, first, between)
            self._speeds.move_to_end(model_host)
            return
        self._speeds[model_host] = _Speed(seconds, token_seconds, first, between)
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


def _model_host(candidate: Candidate) -> ModelHost:
    # Where its host is not known, its runner tells two places apart.
    return (candidate.model, candidate.host or candidate.runner)


def _is_measurement(seconds: float) -> bool:
    return 0.0 <= seconds <= MAX_MEASURED_SECONDS
