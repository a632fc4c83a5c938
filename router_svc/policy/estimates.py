"""Estimated durations of loads and answers, learned from earlier ones.

What was never measured is None or a named default. Times are in seconds. Averages are exponential, so that newer
measurements count for more.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

from router_svc.policy.decisions import Served
from router_svc.policy.endpoints.candidates import Candidate, ModelHost
from router_svc.policy.router_request import MEDIA_UNITS, Request, WorkUnit

NEWEST_SHARE = 0.3
"""Weight of the newest measurement in its average: after six, the first has a weight of a twentieth."""
DEFAULT_OUTPUT_TOKENS = 256.0
"""Assumed answer length of a request without a maximum, if none of its kind was measured."""
DEFAULT_TOKENS_PER_SECOND = 30.0
"""Assumed speed of one request on a model that was never measured: about that of an 8B model on a small GPU."""
PRIOR_ANSWERS = 8
"""Assumed answers of DEFAULT_OUTPUT_TOKENS that are added to the measured ones to estimate the length of an answer with
a maximum: a few short answers say little about one that requests many tokens."""
MAX_COUNTED_ANSWERS = 64
"""Answers that count for a pool's usual length; older ones are discounted."""
DEFAULT_UNIT_SECONDS = {
    WorkUnit.STEP_MEGAPIXELS: 0.15,
    WorkUnit.AUDIO_SECONDS: 0.1,
    WorkUnit.CHARACTERS: 0.005,
}
"""Assumed device time per unit of media work in a pool that was never measured: about that of SDXL, a large Whisper and
a neural voice on a GPU of 16 GB."""
PRIOR_EXCHANGE_SECONDS = 10.0
"""Device seconds at DEFAULT_TOKENS_PER_SECOND that are added to the measured ones in an exchange of tokens and device
time: a few short answers say little."""
MAX_EXCHANGED_REQUESTS = 256
"""Requests that count for a host's exchange; older ones are discounted."""
EXPONENTIAL_DEVIATION = 2.0 / math.e
"""Mean deviation of exponentially distributed lengths from their mean, as a share of the mean."""
MAX_DEVIATION = 3.0
"""A single answer counts at most this share of the expected length: a long one says little about the others."""
MIN_TOKENS_PER_SECOND = 0.1
MAX_OUTPUT_TOKENS = 1_000_000
MAX_EVICTION_SECONDS = 10.0
"""Time that a load takes longer if models are evicted: their backends end and their memory is observed as free."""
MAX_MEASURED_SECONDS = 86_400.0
"""A longer time is not a valid measurement."""
MAX_MEASURED_MODELS = 16_384
"""Maximum models on hosts with stored figures; the least recently used is dropped first."""
MAX_MEASURED_KINDS = 65_536
"""Maximum pairs of pool and tenant with stored answer lengths."""

MIN_COMPARED_SECONDS = 1.0
"""An estimate's error is relative to a wait of at least a second: people hardly notice shorter ones."""


def estimate_error(estimated_seconds: float, waited_seconds: float) -> float:
    """Return the error of an estimate as a share of the actual wait; 0.5: off by half of it."""
    return abs(estimated_seconds - waited_seconds) / max(waited_seconds, MIN_COMPARED_SECONDS)


_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class Recent(OrderedDict[_Key, _Value]):
    """Bounded table; drops the least recently updated entry first."""

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self._max_entries = max_entries

    def put(self, key: _Key, value: _Value) -> None:
        """Update an entry."""
        if key in self:
            self[key] = value
            self.move_to_end(key)
            return
        self[key] = value
        if len(self) > self._max_entries:
            self.popitem(last=False)

    def recent(self, key: _Key, new: Callable[[], _Value]) -> _Value:
        """Return an entry to be updated; a new one if there is none."""
        if key in self:
            self.move_to_end(key)
        else:
            self.put(key, new())
        return self[key]


class Averages(Recent[_Key, float]):
    """Exponential averages."""

    def note(self, key: _Key, measured: float) -> None:
        """Add a measurement."""
        if key in self:
            self[key] += NEWEST_SHARE * (measured - self[key])
            self.move_to_end(key)
        else:
            self.put(key, measured)


@dataclass(slots=True)
class _Speed:
    """Average speed of a model on a host, in one unit of work."""

    unit_seconds: float
    """Time per unit: a token, or a unit of media."""
    first_content_seconds: float | None
    """None: never measured."""
    between_tokens_seconds: float | None
    """None: never measured."""
    most_work: float
    """The largest work of a measured request."""

    def note(
        self,
        unit_seconds: float,
        first_content_seconds: float | None,
        between_tokens_seconds: float | None,
        work: float,
    ) -> None:
        """Add the measurement of one request."""
        self.most_work = max(self.most_work, work)
        self.unit_seconds += NEWEST_SHARE * (unit_seconds - self.unit_seconds)
        if first_content_seconds is not None:
            known = first_content_seconds if self.first_content_seconds is None else self.first_content_seconds
            self.first_content_seconds = known + NEWEST_SHARE * (first_content_seconds - known)
        if between_tokens_seconds is not None:
            paused = self.between_tokens_seconds
            known = between_tokens_seconds if paused is None else paused
            self.between_tokens_seconds = known + NEWEST_SHARE * (between_tokens_seconds - known)


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of one request for one model on one host."""

    first_content_seconds: float
    """0: unknown, or included in the units."""
    unit_seconds: float
    """Time per unit of work: a token, or a unit of media."""

    def seconds_of(self, work: float) -> float:
        """Return the time from grant to end for this many units."""
        return self.first_content_seconds + self.unit_seconds * work


@dataclass(slots=True)
class _Lengths:
    """Usual answer length of a pool."""

    tokens: float = 0.0
    """Tokens of all counted answers ..."""
    ended: float = 0.0
    """... and how many of them ended before their maximum. An answer that was cut off would have been longer, so only
    its tokens count."""
    deviation: float | None = None
    """Mean deviation of lengths from the expected ones, as a share; None: never measured."""

    def note_deviation(self, share: float) -> None:
        """Add the deviation of one length."""
        share = min(share, MAX_DEVIATION)
        self.deviation = (
            share if self.deviation is None else self.deviation + (share - self.deviation) / MAX_COUNTED_ANSWERS
        )

    def note(self, tokens: float, *, was_cut: bool) -> None:
        kept = 1.0 - 1.0 / MAX_COUNTED_ANSWERS
        self.tokens = self.tokens * kept + tokens
        self.ended = self.ended * kept + (not was_cut)

    @property
    def usual(self) -> float:
        return (PRIOR_ANSWERS * DEFAULT_OUTPUT_TOKENS + self.tokens) / (PRIOR_ANSWERS + self.ended)


@dataclass(slots=True)
class _Exchange:
    """Charged tokens per second of accelerator time: what generating models produce in it."""

    tokens: float = 0.0
    device_seconds: float = 0.0

    def note(self, tokens: float, device_seconds: float) -> None:
        kept = 1.0 - 1.0 / MAX_EXCHANGED_REQUESTS
        self.tokens = self.tokens * kept + tokens
        self.device_seconds = self.device_seconds * kept + device_seconds

    @property
    def tokens_per_second(self) -> float:
        prior = PRIOR_EXCHANGE_SECONDS * DEFAULT_TOKENS_PER_SECOND
        return (prior + self.tokens) / (PRIOR_EXCHANGE_SECONDS + self.device_seconds)


class Estimates:
    """Learns from finished loads and requests. All methods are O(1)."""

    def __init__(self) -> None:
        self._load_seconds: Averages[ModelHost] = Averages(MAX_MEASURED_MODELS)
        self._service_seconds: Averages[ModelHost] = Averages(MAX_MEASURED_MODELS)
        self._speeds: Recent[tuple[ModelHost, WorkUnit], _Speed] = Recent(MAX_MEASURED_MODELS)
        self._unit_device_seconds: Averages[tuple[str, WorkUnit]] = Averages(MAX_MEASURED_MODELS)
        """Device time per unit of media, by pool."""
        self._exchanges: Recent[str, _Exchange] = Recent(MAX_MEASURED_MODELS)
        """By host."""
        self._exchange = _Exchange()
        """Of all hosts together."""
        self._output_tokens: Averages[tuple[str, str]] = Averages(MAX_MEASURED_KINDS)
        self._pool_output_tokens: Averages[str] = Averages(MAX_MEASURED_MODELS)
        self._lengths: Recent[str, _Lengths] = Recent(MAX_MEASURED_MODELS)
        """By pool."""

    def note_load(self, candidate: Candidate, seconds: float) -> None:
        """Record the duration of a cold load, from its order until the model was ready.

        Waiting for memory does not count if the runner reports its engine's load time.
        """
        if not _is_measurement(seconds):
            return
        if candidate.usual_load_seconds is not None:
            seconds = min(seconds, candidate.usual_load_seconds + MAX_EVICTION_SECONDS)
        self._load_seconds.note(candidate.model_host, seconds)

    def load_seconds(self, candidate: Candidate) -> float | None:
        """Return how long a load takes, as measured here, else as its runner reports; None: unknown."""
        measured = self._load_seconds.get(candidate.model_host)
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
        """Record the duration of a served request and the time to its first content (None: unknown).

        `limit`: the requested maximum of tokens; None: none.
        """
        if not _is_measurement(seconds) or served.output_tokens <= 0:
            return
        tokens = float(min(served.output_tokens, MAX_OUTPUT_TOKENS))
        self._note_deviation(candidate.pool, tenant, tokens, limit)
        self._note_speed(candidate.model_host, WorkUnit.TOKENS, seconds, first_content_seconds, tokens)
        self._output_tokens.note((candidate.pool, tenant), tokens)
        self._pool_output_tokens.note(candidate.pool, tokens)
        lengths = self._lengths.recent(candidate.pool, _Lengths)
        lengths.note(tokens, was_cut=limit is not None and tokens >= limit)

    def note_media(
        self, candidate: Candidate, unit: WorkUnit, work: float, seconds: float, device_seconds: float
    ) -> None:
        """Record the duration of served media work, and its share of the device time if several requests ran."""
        if not _is_measurement(seconds) or work <= 0.0:
            return
        self._note_speed(candidate.model_host, unit, seconds, None, work)
        self._unit_device_seconds.note((candidate.pool, unit), device_seconds / work)

    def note_exchange(self, candidate: Candidate, tokens: float, device_seconds: float) -> None:
        """Record the tokens that a request was charged and the device time that it took."""
        if candidate.remote or not _is_measurement(device_seconds) or tokens <= 0.0:
            return
        self._exchange.note(tokens, device_seconds)
        _, host = candidate.model_host
        self._exchanges.recent(host, _Exchange).note(tokens, device_seconds)

    def tokens_per_device_second(self, candidate: Candidate) -> float:
        """Return the tokens charged per second of its device's time.

        That is the generation speed of the host's models, or of all hosts if the host has none.
        """
        return self._exchanges.get(candidate.model_host[1], self._exchange).tokens_per_second

    def media_cost(self, pool: str, unit: WorkUnit, work: float) -> float:
        """Return the expected charge of media work in tokens."""
        seconds = self._unit_device_seconds.get((pool, unit))
        if seconds is None:
            seconds = DEFAULT_UNIT_SECONDS[unit]
        return work * seconds * self._exchange.tokens_per_second

    def output_tokens(self, pool: str, tenant: str, limit: int | None) -> float:
        """Return the expected tokens of an answer to this tenant, at most `limit` (None: no limit)."""
        expected = self._output_tokens.get((pool, tenant))
        if expected is None:
            expected = self._pool_output_tokens.get(pool)
        if expected is None:
            expected = DEFAULT_OUTPUT_TOKENS
        return expected if limit is None else min(expected, float(max(limit, 1)))

    def expected_tokens(self, pool: str, tenant: str, limit: int | None) -> float:
        """Return a high estimate of an answer's tokens: its maximum, up to the usual length.

        The usual length is that of answers that ended before their maximum; see PRIOR_ANSWERS.
        """
        measured = self.output_tokens(pool, tenant, None)
        if limit is None:
            return measured
        lengths = self._lengths.get(pool)
        usual = max(measured, DEFAULT_OUTPUT_TOKENS if lengths is None else lengths.usual)
        return min(float(max(limit, 1)), usual)

    def spread(self, pool: str) -> float:
        """Return how much answer lengths vary, from 0 (equal, or unknown) to 1 (exponential, or wider).

        An answer of exponential length is equally likely to end at any time, however long it has lasted.
        """
        lengths = self._lengths.get(pool)
        if lengths is None or lengths.deviation is None:
            return 0.0
        return min(1.0, lengths.deviation / EXPONENTIAL_DEVIATION)

    def speed(self, candidate: Candidate, unit: WorkUnit = WorkUnit.TOKENS) -> Speed | None:
        """Return the speed of one request there; None: never measured."""
        speed = self._speeds.get((candidate.model_host, unit))
        if speed is None:
            return None
        between = speed.unit_seconds if speed.between_tokens_seconds is None else speed.between_tokens_seconds
        return Speed(speed.first_content_seconds or 0.0, between)

    def expected_work(self, pool: str, request: Request) -> float:
        """Return the expected work of a request in its unit: known for media, learned for answers."""
        if request.needs.operation in MEDIA_UNITS:
            return request.spec.work
        return self.expected_tokens(pool, request.spec.tenant, request.spec.max_output_tokens)

    def tokens_per_second(self, candidate: Candidate) -> float:
        """Return a request's tokens per second after its first content."""
        speed = self._speeds.get((candidate.model_host, WorkUnit.TOKENS))
        if speed is None:
            return DEFAULT_TOKENS_PER_SECOND
        seconds = speed.unit_seconds
        return max(MIN_TOKENS_PER_SECOND, 1.0 / seconds) if seconds > 0 else 1.0 / _SHORTEST_TOKEN_SECONDS

    def service_seconds(self, candidate: Candidate, request: Request) -> float | None:
        """Return the expected time of this request from grant to end; None: never measured."""
        unit = MEDIA_UNITS.get(request.needs.operation)
        if unit is not None:
            known = self.speed(candidate, unit)
            return None if known is None or request.spec.work <= 0.0 else known.seconds_of(request.spec.work)
        speed = self._speeds.get((candidate.model_host, WorkUnit.TOKENS))
        if speed is None:
            return None
        first = speed.first_content_seconds or 0.0
        tokens = self.output_tokens(candidate.pool, request.spec.tenant, request.spec.max_output_tokens)
        return first + speed.unit_seconds * tokens

    def certain_service_seconds(self, candidate: Candidate, request: Request) -> float | None:
        """Return the minimum time of this request; None: never measured.

        For small images and short recordings the fixed cost per request dominates the measured speed. So work above the
        largest that was measured counts as that: no request is refused for a time that was never observed.
        """
        unit = MEDIA_UNITS.get(request.needs.operation)
        known = None if unit is None else self._speeds.get((candidate.model_host, unit))
        if unit is None:
            return self.service_seconds(candidate, request)
        if known is None or request.spec.work <= 0.0:
            return None
        return known.unit_seconds * min(request.spec.work, known.most_work)

    def mean_service_seconds(self, candidate: Candidate) -> float | None:
        """Return the mean time of a request; None: never measured."""
        return self._service_seconds.get(candidate.model_host)

    def _note_deviation(self, pool: str, tenant: str, tokens: float, limit: int | None) -> None:
        """Compare a length with the average of earlier ones, if there are any."""
        usual = self._output_tokens.get((pool, tenant))
        if usual is None:
            return
        expected = usual if limit is None else min(usual, float(max(limit, 1)))
        lengths = self._lengths.get(pool)
        if lengths is not None:
            lengths.note_deviation(abs(tokens - expected) / expected)

    def _note_speed(
        self, model_host: ModelHost, unit: WorkUnit, seconds: float, first: float | None, work: float
    ) -> None:
        if first is not None:
            first = min(max(first, 0.0), seconds)
        unit_seconds = (seconds - (first or 0.0)) / work
        # The first token marks the first content: n tokens have n - 1 intervals.
        between = None if first is None or work < 2 else (seconds - first) / (work - 1)
        self._service_seconds.note(model_host, seconds)
        speed = self._speeds.get((model_host, unit))
        if speed is None:
            self._speeds.put((model_host, unit), _Speed(unit_seconds, first, between, work))
        else:
            speed.note(unit_seconds, first, between, work)
            self._speeds.move_to_end((model_host, unit))


def wait_seconds(ahead: int, slots: int, mean_service_seconds: float | None) -> float | None:
    """Return the wait for a slot with this many requests ahead in the queue and all `slots` busy.

    None: unknown, as nothing was measured or there are no slots. The first in the queue waits for the first of `slots`
    running requests, which on average are half done.
    """
    if mean_service_seconds is None or slots <= 0:
        return None
    return (ahead + 0.5) * mean_service_seconds / slots


_SHORTEST_TOKEN_SECONDS = 1e-6


def _is_measurement(seconds: float) -> bool:
    return 0.0 <= seconds <= MAX_MEASURED_SECONDS
