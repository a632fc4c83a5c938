"""Who was considered for a request, in words."""

from typing import TYPE_CHECKING

from router_svc.policy.endpoints.candidates import Readiness
from router_svc.policy.endpoints.capability import NO_FALLBACK, fits
from router_svc.policy.endpoints.choice import MAX_CONSIDERED, SHOWN_OF_MANY, Considered, Wish
from router_svc.policy.endpoints.health import Standing
from router_svc.policy.endpoints.pool import Seat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router_svc.policy.arrival import Needs
    from router_svc.policy.endpoints.candidates import CandidateKey
    from router_svc.policy.endpoints.pool import Pool
    from router_svc.policy.endpoints.routes import Rung

SAMPLE_SECONDS = 0.1
MAX_SAMPLES = 1_024
"""Lines and needs of which a sample is kept."""
_CHOSEN, _FREE, _READY, _LOADING, _ASLEEP, _DOWN, _UNFIT = 6, 5, 4, 3, 2, 1, 0
_WARMTH = {
    Readiness.READY: _READY,
    Readiness.LOADING: _LOADING,
    Readiness.ASLEEP: _ASLEEP,
    Readiness.DOWN: _DOWN,
}
_WORDS = {Readiness.LOADING: "loading", Readiness.ASLEEP: "asleep", Readiness.DOWN: "not heard of"}


class Samples:
    """Who else was considered lately in lines of many: looking at them anew for every choice would cost too much."""

    def __init__(self) -> None:
        self._others: dict[tuple[str, Needs], tuple[float, tuple[Considered, ...]]] = {}

    def others(
        self, line: str, rungs: "Sequence[Rung]", wish: Wish, now: float, chosen: Seat
    ) -> tuple[Considered, ...]:
        """As `consider` has them for a choice; of many, as they were SAMPLE_SECONDS ago, the chosen one among them."""
        if wish.excluded or len(rungs) != 1 or count_of(rungs) <= MAX_CONSIDERED:
            return consider(rungs, wish, now, besides=chosen, most=SHOWN_OF_MANY)
        known = self._others.get((line, wish.needs))
        if known is None or now >= known[0] + SAMPLE_SECONDS:
            if len(self._others) >= MAX_SAMPLES:
                self._others.clear()
            known = (now, consider(rungs, wish, now, most=SHOWN_OF_MANY))
            self._others[line, wish.needs] = known
        return known[1]


def consider(
    rungs: "Sequence[Rung]", wish: Wish, now: float, *, besides: Seat | None = None, most: int = MAX_CONSIDERED
) -> tuple[Considered, ...]:
    """Who was considered, besides one: who is free, then who is ready, loading, asleep, down, or lacks something.

    Among equals by position on the ladder and by load. Of more than MAX_CONSIDERED only some, at most `most`.
    """
    shown = most if count_of(rungs) > MAX_CONSIDERED else MAX_CONSIDERED
    considered: dict[CandidateKey, Considered] = {}
    for rung in rungs:
        shelves = rung.pool.fitting(rung.needs(wish.needs))
        for seat in rung.some_seats(shelves, shown):
            if seat is besides or seat.key in considered:
                continue
            if rung.leaves_out(seat):
                considered[seat.key] = _described(seat, _UNFIT, rung.position, NO_FALLBACK)
            elif seat.shelf in shelves and seat.key not in wish.excluded and not rung.gate and seat.health.is_quiet:
                considered[seat.key] = _as_it_is(seat, rung.position)
            else:
                considered[seat.key] = _consider(rung, seat, wish, now)
    return tuple(sorted(considered.values(), key=_preference)[:shown])


def count_of(rungs: "Sequence[Rung]") -> int:
    """How many there are to choose among."""
    return rungs[0].count() if len(rungs) == 1 else sum(rung.count() for rung in rungs)


def score_of_chosen(rungs: "Sequence[Rung]", chosen: Seat) -> float:
    """What the chosen one is shown with: above that of all others."""
    position = rungs[0].position if len(rungs) == 1 else next(rung.position for rung in rungs if rung.holds(chosen))
    return _score(_CHOSEN, position, chosen)


def gate(seat: Seat, wish: Wish, now: float) -> str:
    """What keeps a candidate from serving a request now, in words; empty: nothing."""
    if lacking := fits(seat.candidate, wish.needs):
        return lacking
    if seat.key in wish.excluded:
        return "tried in vain for this request"
    if seat.candidate.readiness is Readiness.READY and seat.held_for is None and (unwell := seat.health.gate(now)):
        return unwell
    return _state(seat) or (_cap(seat.pool) if seat.pool.is_at_its_cap else "")


def _state(seat: Seat) -> str:
    """What keeps it from any request, but for how it did and for its pool."""
    candidate = seat.candidate
    if candidate.readiness is not Readiness.READY:
        return _WORDS[candidate.readiness]
    if seat.held_for is not None:
        return f"held for {seat.held_for or 'another model'} to be loaded"
    if seat.is_full:
        return f"all {candidate.slots} slots are busy"
    if seat.runner_is_full:
        return f"its runner works on {seat.runner.requests} requests, which is all it takes"
    if seat.health.standing is Standing.ON_TRIAL and seat.trying:
        return "one request tries whether it works again"
    return ""


def _cap(pool: "Pool") -> str:
    return f"{pool.name} has {pool.in_flight} of {pool.settings.max_in_flight} requests running"


def _as_it_is(seat: Seat, position: int) -> Considered:
    """One whom nothing keeps from the request but what keeps it from any other; worked out once per change of it."""
    known = seat.considered
    if known is None or known[0] != position:
        candidate = seat.candidate
        why_not = "" if seat.is_open else _state(seat)
        warmth = _FREE if not why_not else _WARMTH[candidate.readiness]
        known = seat.considered = (position, _described(seat, warmth, position, why_not))
    if seat.is_open and seat.pool.is_at_its_cap:
        return _described(seat, _READY, position, _cap(seat.pool))
    return known[1]


def _consider(rung: "Rung", seat: Seat, wish: Wish, now: float) -> Considered:
    lacking = fits(seat.candidate, wish.needs)
    why_not = lacking or gate(seat, wish, now) or rung.gate
    warm = _WARMTH[seat.candidate.readiness] if why_not else _FREE
    warmth = _UNFIT if lacking else warm
    return _described(seat, warmth, rung.position, why_not)


def _described(seat: Seat, warmth: int, position: int, why_not: str) -> Considered:
    return Considered(
        model=seat.candidate.model,
        runner=seat.candidate.runner,
        score=_score(warmth, position, seat),
        gate=why_not,
    )


def _score(warmth: int, position: int, seat: Seat) -> float:
    below = position + min(seat.share, 1.0) / 2
    return warmth + 1 / (1 + below)


def _preference(considered: Considered) -> tuple[float, str]:
    return (-considered.score, considered.model)
