"""Explains decisions: which candidates were considered for a request, and why each could not take it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from router_svc.policy.endpoints.candidates import CandidateKey, Readiness
from router_svc.policy.endpoints.choice import FREE, MAX_CONSIDERED, SHOWN_OF_MANY, Considered, PickRequest
from router_svc.policy.endpoints.circuit_breaker import HealthState
from router_svc.policy.endpoints.pool import Endpoint, Pool
from router_svc.policy.endpoints.required_capabilities import NO_FALLBACK, fits
from router_svc.policy.endpoints.routes import RouteStep

if TYPE_CHECKING:
    from router_svc.policy.endpoints.candidates import Needs

SAMPLE_SECONDS = 0.1
MAX_SAMPLES = 1_024
"""Combinations of queue and needs with a cached sample."""
_CHOSEN, _READY, _LOADING, _ASLEEP, _DOWN, _UNFIT = 6, 4, 3, 2, 1, 0
_WARMTH = {
    Readiness.READY: _READY,
    Readiness.LOADING: _LOADING,
    Readiness.ASLEEP: _ASLEEP,
    Readiness.DOWN: _DOWN,
}
_UNREADY_GATES = {Readiness.LOADING: "loading", Readiness.ASLEEP: "hibernating", Readiness.DOWN: "no heartbeat"}


class ConsideredSamples:
    """Recent samples of considered candidates, for queues with too many to describe for every choice."""

    def __init__(self) -> None:
        self._others: dict[tuple[str, Needs], tuple[float, tuple[Considered, ...]]] = {}

    def others(
        self, queue: str, steps: Sequence[RouteStep], pick: PickRequest, now: float, chosen: Endpoint
    ) -> tuple[Considered, ...]:
        """Return `consider` for a choice; if there are many candidates, a sample up to SAMPLE_SECONDS old."""
        if pick.excluded or len(steps) != 1 or count_of(steps) <= MAX_CONSIDERED:
            return consider(steps, pick, now, besides=chosen, most=SHOWN_OF_MANY)
        known = self._others.get((queue, pick.needs))
        if known is None or now >= known[0] + SAMPLE_SECONDS:
            if len(self._others) >= MAX_SAMPLES:
                self._others.clear()
            known = (now, consider(steps, pick, now, most=SHOWN_OF_MANY))
            self._others[queue, pick.needs] = known
        return known[1]


def consider(
    steps: Sequence[RouteStep],
    pick: PickRequest,
    now: float,
    *,
    besides: Endpoint | None = None,
    most: int = MAX_CONSIDERED,
) -> tuple[Considered, ...]:
    """Describe candidates except `besides`: free ones first, then ready, loading, hibernating, down, unfit ones.

    Equal ones are ordered by position in the route and by load. Of more than MAX_CONSIDERED, at most `most`.
    """
    shown = most if count_of(steps) > MAX_CONSIDERED else MAX_CONSIDERED
    considered: dict[CandidateKey, Considered] = {}
    for step in steps:
        groups = step.pool.fitting(step.needs(pick.needs))
        for endpoint in step.some_endpoints(groups, shown):
            if endpoint is besides or endpoint.key in considered:
                continue
            if step.leaves_out(endpoint):
                considered[endpoint.key] = _described(endpoint, _UNFIT, step.position, NO_FALLBACK)
            elif (
                endpoint.group in groups
                and endpoint.key not in pick.excluded
                and not step.gate
                and endpoint.health.is_quiet
            ):
                considered[endpoint.key] = _as_it_is(endpoint, step.position)
            else:
                considered[endpoint.key] = _consider(step, endpoint, pick, now)
    return tuple(sorted(considered.values(), key=_preference)[:shown])


def count_of(steps: Sequence[RouteStep]) -> int:
    """Return the number of candidates."""
    return steps[0].count() if len(steps) == 1 else sum(step.count() for step in steps)


def score_of_chosen(steps: Sequence[RouteStep], chosen: Endpoint) -> float:
    """Return the score of the selected endpoint, which exceeds all others."""
    position = steps[0].position if len(steps) == 1 else next(step.position for step in steps if step.holds(chosen))
    return _score(_CHOSEN, position, chosen)


def gate(endpoint: Endpoint, pick: PickRequest, now: float) -> str:
    """Return why an endpoint cannot serve a request now, as text; empty: it can."""
    if lacking := fits(endpoint.candidate, pick.needs):
        return lacking
    if endpoint.key in pick.excluded:
        return "an attempt of this request failed on it"
    if (
        endpoint.candidate.readiness is Readiness.READY
        and endpoint.held_for is None
        and (unhealthy := endpoint.health.gate(now))
    ):
        return unhealthy
    return _state(endpoint) or (_cap(endpoint.pool) if endpoint.pool.is_at_its_cap else "")


def _state(endpoint: Endpoint) -> str:
    """Return why an endpoint takes no request at all, apart from its health and its pool."""
    candidate = endpoint.candidate
    if candidate.readiness is not Readiness.READY:
        return _UNREADY_GATES[candidate.readiness]
    if endpoint.held_for is not None:
        return f"held for {endpoint.held_for or 'another model'} to be loaded"
    if endpoint.is_full:
        return "its slot is busy" if candidate.slots == 1 else f"all {candidate.slots} slots are busy"
    if endpoint.runner_is_full:
        return f"its runner is at its limit of {endpoint.candidate.runner_max_requests} requests"
    if endpoint.health.state is HealthState.ON_TRIAL and endpoint.trying:
        return "a trial request is running there"
    return ""


def _cap(pool: Pool) -> str:
    return f"{pool.name} has {pool.in_flight} of {pool.settings.max_in_flight} requests running"


def _as_it_is(endpoint: Endpoint, position: int) -> Considered:
    """Describe an endpoint that can serve the request; cached until the endpoint changes."""
    known = endpoint.considered
    if known is None or known[0] != position:
        candidate = endpoint.candidate
        why_not = "" if endpoint.is_open else _state(endpoint)
        warmth = FREE if not why_not else _WARMTH[candidate.readiness]
        known = endpoint.considered = (position, _described(endpoint, warmth, position, why_not))
    if endpoint.is_open and endpoint.pool.is_at_its_cap:
        return _described(endpoint, _READY, position, _cap(endpoint.pool))
    return known[1]


def _consider(step: RouteStep, endpoint: Endpoint, pick: PickRequest, now: float) -> Considered:
    lacking = fits(endpoint.candidate, step.needs(pick.needs))
    why_not = lacking or gate(endpoint, pick, now) or step.gate
    warm = _WARMTH[endpoint.candidate.readiness] if why_not else FREE
    warmth = _UNFIT if lacking else warm
    return _described(endpoint, warmth, step.position, why_not)


def _described(endpoint: Endpoint, warmth: int, position: int, why_not: str) -> Considered:
    return Considered(
        model=endpoint.candidate.model,
        runner=endpoint.candidate.runner,
        score=_score(warmth, position, endpoint),
        gate=why_not,
        engine_load=endpoint.engine_load.explanation(endpoint.candidate.slots),
    )


def _score(warmth: int, position: int, endpoint: Endpoint) -> float:
    below = position + min(endpoint.share, 1.0) / 2
    return warmth + 1 / (1 + below)


def _preference(considered: Considered) -> tuple[float, str]:
    return (-considered.score, considered.model)
