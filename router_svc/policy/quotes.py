"""Quotes: when each place that can serve a request would send its first token and its last one.

An estimate adds the wait for a slot or a load, the time to the first token there, and the expected tokens. How far such
estimates are off is measured: the actual times of the latest answers, as shares of what was estimated when they
arrived. Quantiles of these shares turn an estimate into a median and a time that nine of ten answers keep.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from router_svc.policy.endpoints.candidate_index import CandidateIndex
from router_svc.policy.endpoints.candidates import Candidate, CandidateKey, ModelHost
from router_svc.policy.endpoints.first_token import Busy, Line, first_token
from router_svc.policy.endpoints.prefix_affinity import NO_HIT, Hit
from router_svc.policy.estimates import MAX_MEASURED_MODELS, Averages, Recent
from router_svc.policy.progress.wait_estimator import WaitEstimator
from router_svc.policy.queue.queue import Queue
from router_svc.policy.queue.queues import TenantCaps
from router_svc.policy.router_request import Estimate, EstimatedPart, Request
from weft.kernel.requests.request_values import Operation

QUOTED = frozenset({Operation.CHAT, Operation.COMPLETION})
"""Operations with quotes."""
MAX_QUOTED_PLACES = 16
"""Maximum ready places in a quote; a pool may have thousands."""
MAX_COMPARED_PLACES = 4
"""Maximum places among which the soonest is estimated for an arriving request."""
SAMPLED_REQUESTS = 4
"""Of so many requests without a limit, one is estimated to learn from it."""
MAX_SHARES = 128
"""Latest answers of a place whose errors count."""
MIN_SHARES = 20
"""Answers of a place below which those of all places count, and below which of all the assumed shares do."""
ASSUMED_SHARES = (1.0, 3.0)
"""Median and 90 % share of an estimate before enough answers were measured."""
MIN_ESTIMATE_SECONDS = 0.01
"""A shorter estimate counts as this: below, the clock and the network are most of the time."""
MEDIAN, MOST = 0.5, 0.9


class Spread(NamedTuple):
    """An uncertain time, in seconds."""

    p50: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """What a place offers for a request. Times count from its arrival."""

    candidate: Candidate
    wait_seconds: float | None
    """Estimated wait for a slot or a load; None: unknown, as the load was never measured, and so are the times."""
    first_token: Spread | None
    completion: Spread | None
    output_tokens: float
    energy_joules: float | None
    """Expected energy of its accelerators; None: none was measured there."""
    measured: int
    """Answers of this place from which the spread of its first token follows; 0: it is assumed."""


class _Shares:
    """The latest shares of one place and part, also in order of size."""

    __slots__ = ("_latest", "_ordered", "count")

    def __init__(self) -> None:
        self._latest: deque[float] = deque()
        self._ordered: list[float] = []
        self.count = 0

    def add(self, share: float) -> None:
        """Add a share; at most MAX_SHARES are kept."""
        if self.count == MAX_SHARES:
            self._ordered.pop(bisect_left(self._ordered, self._latest.popleft()))
        else:
            self.count += 1
        self._latest.append(share)
        insort(self._ordered, share)

    def quantile(self, share: float) -> float:
        """Return the value that this share of further ones stays below, so that few measurements give a wide range."""
        rank = math.ceil(share * (self.count + 1))
        return self._ordered[min(self.count, rank) - 1]


class EstimateErrors:
    """Actual times as shares of the estimated ones, by place and part."""

    def __init__(self) -> None:
        self._of_places: Recent[tuple[ModelHost, EstimatedPart], _Shares] = Recent(MAX_MEASURED_MODELS)
        self._of_all: dict[EstimatedPart, _Shares] = {part: _Shares() for part in EstimatedPart}

    def note(self, candidate: Candidate, part: EstimatedPart, estimated: float, actual: float) -> None:
        """Add a measured time."""
        share = actual / max(estimated, MIN_ESTIMATE_SECONDS)
        key = (candidate.model_host, part)
        if (shares := self._of_places.get(key)) is None:
            shares = _Shares()
        shares.add(share)
        self._of_places.put(key, shares)
        self._of_all[part].add(share)

    def measured(self, candidate: Candidate, part: EstimatedPart) -> int:
        """Return how many measured times of this place count; 0: too few."""
        shares = self._of_places.get((candidate.model_host, part))
        return 0 if shares is None or shares.count < MIN_SHARES else shares.count

    def spread(self, candidate: Candidate, part: EstimatedPart, estimated: float) -> Spread:
        """Return an estimate with the errors of earlier ones."""
        estimated = max(estimated, MIN_ESTIMATE_SECONDS)
        for shares in (self._of_places.get((candidate.model_host, part)), self._of_all[part]):
            if shares is not None and shares.count >= MIN_SHARES:
                return Spread(shares.quantile(MEDIAN) * estimated, shares.quantile(MOST) * estimated)
        return Spread(*(share * estimated for share in ASSUMED_SHARES))


@dataclass(slots=True)
class Coverage:
    """How often a time was kept, such as one that nine of ten answers should keep."""

    kept: int = 0
    answers: int = 0

    def note(self, actual: float, most: float) -> None:
        """Add an answer."""
        self.kept += actual <= most
        self.answers += 1


class Quotes:
    """Estimates requests at their arrival, and learns from their ends."""

    def __init__(self, index: CandidateIndex, caps: TenantCaps, estimator: WaitEstimator) -> None:
        self._index = index
        self._caps = caps
        self._estimator = estimator
        self._errors = EstimateErrors()
        self.watts: Averages[ModelHost] = Averages(MAX_MEASURED_MODELS)
        """Energy per second of an answer's share of the accelerators, where it is measured."""
        self.first_tokens, self.completions = Coverage(), Coverage()
        self.promises = Coverage()
        """Of the times that callers set as their limits."""

    def coverage(self) -> dict[str, Coverage]:
        """Return how often times were kept, by what was quoted or promised."""
        return {"first_token": self.first_tokens, "completion": self.completions, "max_wait": self.promises}

    def quote(self, request: Request, queue: Queue, now: float) -> list[Quote]:
        """Return the quotes of all places that can serve a request, the soonest first; at most MAX_QUOTED_PLACES ready.

        The request must have entered its queue's tenant account, but not the queue.
        """
        places = self._free(request, queue, MAX_QUOTED_PLACES) or self._waits(request, queue, now, MAX_QUOTED_PLACES)
        quotes = [self._quote(each) for each in self._estimates(request, places, now)]
        quotes.sort(key=lambda each: math.inf if each.first_token is None else each.first_token.p50)
        return quotes

    def expect(self, request: Request, queue: Queue, now: float) -> None:
        """Keep the soonest estimate of an arriving request, with which its actual times are compared.

        That costs up to as much as the rest of a decision. So one in SAMPLED_REQUESTS is estimated, and those whose
        caller has a limit.
        """
        spec = request.spec
        if request.key % SAMPLED_REQUESTS and spec.max_wait_seconds is None:
            return
        if spec.operation not in QUOTED or spec.age_seconds or request.kind.durable:
            return
        most = MAX_COMPARED_PLACES
        places = self._free(request, queue, most) or self._waits(request, queue, now, most)
        known = [each for each in self._estimates(request, places, now) if each.wait < math.inf]
        soonest = request.estimate = min(known, key=lambda each: each.first, default=None)
        if soonest is not None:
            soonest.first_most = self._errors.spread(soonest.candidate, soonest.first_part, soonest.first).p90
            soonest.end_most = self._errors.spread(soonest.candidate, soonest.end_part, soonest.end).p90

    def note_first_token(self, request: Request, now: float) -> None:
        """Compare a request's first token with the estimate."""
        seconds, limit = now - request.arrived_at, request.spec.max_wait_seconds
        if limit is not None:
            self.promises.note(seconds, limit)
        if (known := request.estimate) is not None:
            self._errors.note(known.candidate, known.first_part, known.first, seconds)
            self.first_tokens.note(seconds, known.first_most)

    def note_end(self, request: Request, now: float) -> None:
        """Compare the end of an answered request with the estimate."""
        if (known := request.estimate) is not None:
            seconds = now - request.arrived_at
            self._errors.note(known.candidate, known.end_part, known.end, seconds)
            self.completions.note(seconds, known.end_most)

    def _quote(self, known: Estimate) -> Quote:
        candidate, errors = known.candidate, self._errors
        is_known, watts = known.wait < math.inf, self.watts.get(candidate.model_host)
        return Quote(
            candidate=candidate,
            wait_seconds=known.wait if is_known else None,
            first_token=errors.spread(candidate, known.first_part, known.first) if is_known else None,
            completion=errors.spread(candidate, known.end_part, known.end) if is_known else None,
            output_tokens=known.output_tokens,
            energy_joules=watts * (known.end - known.wait) if is_known and watts is not None else None,
            measured=errors.measured(candidate, known.first_part),
        )

    def _estimates(self, request: Request, places: Iterable[tuple[Candidate, float]], now: float) -> Iterator[Estimate]:
        """Yield the estimates of places with these waits."""
        hits: dict[str, Mapping[CandidateKey, Hit]] = {}
        for candidate, wait in places:
            endpoint = self._index.table.by_key.get(candidate.key)
            if endpoint is None:
                continue
            pool = endpoint.pool.name
            if pool not in hits:
                hits[pool] = self._index.selector.caches.hits(pool, request.spec.prefix_digests)
            # A request that waits for a slot takes that of one that has ended.
            busy = Busy(
                requests=max(0, endpoint.engine_slots.requests - (1 if wait else 0)),
                load=endpoint.engine_load,
                line=Line(0.0 if wait else endpoint.engine_slots.line.seconds(now)),
            )
            speed = self._index.selector.speeds.of(candidate, now)
            hit = hits[pool].get(candidate.key, NO_HIT)
            first = wait + first_token(candidate, busy, speed, request.spec.prompt_tokens, hit).seconds
            tokens = self._estimator.estimates.output_tokens(pool, request.spec.tenant, request.spec.max_output_tokens)
            end = first + max(0.0, tokens - 1.0) * speed.between_seconds
            yield Estimate(candidate=candidate, wait=wait, first=first, end=end, output_tokens=tokens)

    def _free(self, request: Request, queue: Queue, most: int) -> list[tuple[Candidate, float]]:
        """Return places with a free slot for a request that need not wait behind others, with a wait of 0."""
        if queue.keeps_waiting(request.spec.priority) or not self._caps.may_run(request.spec.tenant):
            return []
        pick = self._estimator.pick(request)
        return [(endpoint.candidate, 0.0) for endpoint in self._index.free_endpoints(queue.name, pick, most)]

    def _waits(self, request: Request, queue: Queue, now: float, most: int) -> Iterator[tuple[Candidate, float]]:
        """Yield places with the wait for a slot or a load there, infinite if unknown."""
        capacity, table = self._estimator.capacity(queue, request.kind), self._index.table
        if capacity.takers:
            position = queue.position_of(request)
            in_queue = self._estimator.shown_slot_wait(request, queue, capacity, position, now)
            for candidate in capacity.takers[:most]:
                yield candidate, math.inf if in_queue is None else in_queue
        for model in capacity.loading:
            loading = table.candidate(model)
            if loading is not None:
                yield loading, math.inf if loading.load_eta_seconds is None else loading.load_eta_seconds
        for candidate in capacity.asleep:
            seconds = self._estimator.estimates.load_seconds(candidate)
            yield candidate, math.inf if seconds is None else seconds
