"""The scheduler: requests and facts in, decisions out. State, but no clock, no I/O and no randomness.

Every method takes `now` (seconds, monotonic) and returns what was decided. One loop owns the scheduler and calls it;
see router_svc/DESIGN.md for the life of a request.
"""

from dataclasses import dataclass, field

from router_svc.policy import refusals, words
from router_svc.policy.candidates import Candidate, Fleet, Readiness
from router_svc.policy.decisions import Decision, Placed, Rejects, RequestDecision
from router_svc.policy.failover import FailureKind, classify
from router_svc.policy.first_hand import FirstHand
from router_svc.policy.grants import CandidateKey, GrantBook
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.pauses import PauseBook
from router_svc.policy.queue import Arrival, WaitingQueue
from router_svc.policy.queue_lengths import QueueLength, queue_lengths
from router_svc.policy.select import least_loaded
from router_svc.policy.wakes import WakeBook
from weft.kernel.reasons import Reason


@dataclass(slots=True)
class _Request:
    arrival: Arrival
    attempt: int
    queued_since: float
    """From when on the queue timeout counts."""
    bounces: int = 0
    placed_on: Candidate | None = None
    broken_on: set[CandidateKey] = field(default_factory=set)
    lacking: set[CandidateKey] = field(default_factory=set)
    """Who has not what it needs: that costs nobody anything, and is no attempt that counts."""
    failed_wakes: set[str] = field(default_factory=set)
    """Models whose wake failed while this request waited for it; it does not wake them again."""
    awaited_wake: str | None = None
    """The model whose wake it waits for."""
    last_failure: Rejects | None = None
    """What it is told when nothing is left to try."""
    told: RequestDecision | None = None

    def await_wake(self, model: str | None, now: float) -> None:
        """Wait for this wake from now on, or for none. The queue timeout counts from the end of a wake."""
        if self.awaited_wake is not None and model != self.awaited_wake:
            self.queued_since = now
        self.awaited_wake = model


class Scheduler:
    """Places requests on candidates: at once when a slot is free and nobody is ahead, otherwise in order."""

    def __init__(self, limits: SchedulerLimits | None = None) -> None:
        self._limits = limits or SchedulerLimits()
        self._told = Fleet()
        """As the registry tells it."""
        self._fleet = Fleet()
        """The same with what runners said themselves."""
        self._first_hand = FirstHand()
        self._requests: dict[int, _Request] = {}
        self._queue = WaitingQueue()
        self._grants = GrantBook()
        self._pauses = PauseBook(self._limits)
        self._wakes = WakeBook(self._limits.wake_settle_seconds)

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """How many requests hold a slot."""
        return self._grants.total

    def queues(self) -> list[QueueLength]:
        """How much is asked of each pool, in order of their names."""
        return queue_lengths(self._fleet, self._queue, self._grants, self._limits)

    def update_fleet(self, fleet: Fleet, now: float) -> list[Decision]:
        """The mesh changed: serve whoever can be served now, refuse whoever waits in vain."""
        self._told = fleet
        self._fleet = self._first_hand.corrected(fleet)
        alive = [candidate.key for candidate in fleet]
        self._grants.forget_others(alive)
        self._pauses.forget_others(alive)
        self._wakes.forget_others(fleet.pool_of_model)
        return self._serve(now)

    def submit(self, arrival: Arrival, now: float) -> list[Decision]:
        """A request arrived."""
        request = _Request(arrival, attempt=arrival.attempts_used, queued_since=arrival.arrived_at)
        refusal = self._refusal(request)
        if refusal is not None:
            return [refusal]
        waiting = self._waiting_for_the_same(arrival)
        free = None if waiting else self._free_candidate(request, now)
        if free is not None:
            self._requests[arrival.key] = request
            return [self._place(request, free, now)]
        depth = self._limits.queue_depth_per_runner * len(self._eligible(request))
        if waiting >= depth:
            return [refusals.queue_full(arrival, depth, self._limits.full_retry_seconds)]
        self._requests[arrival.key] = request
        self._queue.add(arrival)
        return self._serve(now)

    def report_first_content(self, key: int) -> None:
        """The answer has begun: its runner is not full."""
        request = self._requests.get(key)
        if request is not None and request.placed_on is not None:
            self._pauses.note_content(request.placed_on)

    def report_failed(self, key: int, attempt: int, reason: Reason, now: float) -> list[Decision]:
        """An attempt failed before any content: place the request elsewhere, queue it again, or refuse it."""
        request = self._requests.get(key)
        if request is None or request.placed_on is None or request.attempt != attempt:
            return []
        candidate = request.placed_on
        self._release(request)
        kind = classify(reason)
        self._pauses.note_failure(candidate, kind, now)
        rejection = Rejects(key=key, reason=reason, message=f"attempt {attempt} failed and is not repeated")
        if kind is FailureKind.BOUNCED:
            request.bounces += 1
            self._doubt(candidate, reason, request.bounces)
        elif kind in (FailureKind.BROKE, FailureKind.LACKS):
            (request.broken_on if kind is FailureKind.BROKE else request.lacking).add(candidate.key)
            request.last_failure = rejection
        if kind is FailureKind.FINAL or self._exhausted(request):
            del self._requests[key]
            return [rejection, *self._serve(now)]
        self._queue.add(request.arrival)
        return self._serve(now)

    def finish(self, key: int, now: float) -> list[Decision]:
        """The request ended or its caller left: whatever it held is free. A wake that it waited for goes on."""
        request = self._requests.pop(key, None)
        if request is None:
            return []
        if request.placed_on is None:
            self._queue.remove(request.arrival)
        else:
            self._release(request)
        return self._serve(now)

    def wake_finished(self, model: str, error: str | None, now: float, *, by_word: bool = False) -> list[Decision]:
        """A wake ended: with an error, why; without, the fleet shows the model ready now or within the settle time.

        `by_word`: its runner insists that it is awake, so it counts as ready until the registry has news of it.
        """
        if error is None:
            self._wakes.note_woken(model, now)
            if by_word:
                self._believe(model, Readiness.READY)
            return self._serve(now)
        failed = self._fail_wake(model, error, now)
        return failed + self._serve(now)

    def tick(self, now: float) -> list[Decision]:
        """Time passed: refuse who waited too long, tell the others where they stand."""
        decisions: list[Decision] = []
        for arrival in self._queue:
            expired = self._expiry(self._requests[arrival.key], now)
            if expired is not None:
                decisions.append(self._drop(arrival, expired))
        return decisions + self._serve(now)

    def _doubt(self, candidate: Candidate, reason: Reason, bounces: int) -> None:
        """A model that is shown as ready and again and again is not: the view is old, and it sleeps."""
        if reason is Reason.BACKEND_NOT_READY and candidate.runner_wakes and bounces >= self._limits.stale_view_bounces:
            self._believe(candidate.model, Readiness.ASLEEP)

    def _believe(self, model: str, readiness: Readiness) -> None:
        self._first_hand.note(self._told, model, readiness)
        self._fleet = self._first_hand.corrected(self._told)

    def _expiry(self, request: _Request, now: float) -> Rejects | None:
        arrival = request.arrival
        if arrival.deadline_at is not None and now >= arrival.deadline_at:
            return refusals.deadline_passed(arrival)
        waited = now - request.queued_since
        if request.awaited_wake is None and waited >= self._limits.queue_timeout_seconds:
            return refusals.waited_too_long(arrival, waited, self._limits.full_retry_seconds)
        return None

    def _drop(self, arrival: Arrival, rejection: Rejects) -> Rejects:
        self._queue.remove(arrival)
        del self._requests[arrival.key]
        return rejection

    def _fail_wake(self, model: str, error: str, now: float) -> list[Decision]:
        """Refuse who waited for this wake and has nothing else left to try."""
        self._wakes.note_failed(model)
        decisions: list[Decision] = []
        for arrival in self._queue:
            request = self._requests[arrival.key]
            if request.awaited_wake != model:
                continue
            request.await_wake(None, now)
            request.failed_wakes.add(model)
            request.last_failure = refusals.wake_failed(arrival, model, error)
            if self._exhausted(request):
                decisions.append(self._drop(arrival, request.last_failure))
        return decisions

    def _serve(self, now: float) -> list[Decision]:
        """Place every waiting request that can be placed, in order, and tell the rest what changed for them."""
        decisions: list[Decision] = []
        for model in self._wakes.settle(self._fleet, now):
            decisions += self._fail_wake(model, "it woke but did not report ready", now)
        position = 0
        for arrival in self._queue:
            request = self._requests[arrival.key]
            refusal = self._refusal(request)
            if refusal is not None:
                decisions.append(self._drop(arrival, refusal))
                continue
            free = self._free_candidate(request, now)
            if free is not None:
                self._queue.remove(arrival)
                decisions.append(self._place(request, free, now))
                continue
            position += 1
            decisions += self._wait(request, position, now)
        return decisions

    def _wait(self, request: _Request, position: int, now: float) -> list[Decision]:
        """Settle what a request waits for: a slot, a load, or a wake, which is begun if it must be."""
        eligible = self._eligible(request)
        ready = [candidate for candidate in eligible if candidate.readiness is Readiness.READY]
        waking = [candidate for candidate in eligible if self._wakes.is_waking(candidate)]
        loading = [c for c in eligible if c.readiness is Readiness.LOADING and c not in waking]
        begun: list[Decision] = []
        told: RequestDecision
        if ready or loading:
            request.await_wake(None, now)
            arrival = request.arrival
            told = words.waits_for_slot(arrival, position, ready) if ready else words.waits_for_load(arrival, loading)
        else:
            if not waking:
                waking = [self._wakes.preferred(eligible, self._grants.on_runner)]
                doubted, priority = waking[0] not in self._told, request.arrival.priority
                begun.append(self._wakes.begin(waking[0], now, doubted=doubted, priority=priority))
            told = self._waits_for_wake(request, waking, now)
        if told == request.told:
            return begun
        request.told = told
        return [*begun, told]

    def _waits_for_wake(self, request: _Request, waking: list[Candidate], now: float) -> RequestDecision:
        awaited = next((candidate for candidate in waking if candidate.model == request.awaited_wake), waking[0])
        request.await_wake(awaited.model, now)
        return words.waits_for_wake(request.arrival, awaited, self._wakes.status(awaited.model, now))

    def _place(self, request: _Request, candidate: Candidate, now: float) -> Placed:
        request.await_wake(None, now)
        request.placed_on = candidate
        request.told = None
        request.attempt += 1
        self._grants.take(candidate, now)
        return Placed(key=request.arrival.key, candidate=candidate, attempt=request.attempt)

    def _release(self, request: _Request) -> None:
        candidate = request.placed_on
        assert candidate is not None, "only a placed request holds a slot"
        request.placed_on = None
        self._grants.release(candidate)

    def _free_candidate(self, request: _Request, now: float) -> Candidate | None:
        usable = (
            candidate
            for candidate in self._eligible(request)
            if candidate.readiness is Readiness.READY
            and self._pauses.over(candidate, now)
            and self._grants.runner_has_room(candidate)
        )
        return least_loaded(usable, in_flight=self._grants.in_flight, last_granted=self._grants.last_granted)

    def _eligible(self, request: _Request) -> list[Candidate]:
        """Where it could run, now or later: neither down nor tried in vain."""
        return [
            candidate
            for candidate in refusals.permitted(request.arrival, self._fleet)
            if self._is_up(candidate)
            and candidate.key not in request.broken_on | request.lacking
            and not (candidate.readiness is Readiness.ASLEEP and candidate.model in request.failed_wakes)
        ]

    def _is_up(self, candidate: Candidate) -> bool:
        """A host that wakes may look gone for a moment; its wake tells how it ends."""
        return candidate.readiness is not Readiness.DOWN or self._wakes.is_waking(candidate)

    def _exhausted(self, request: _Request) -> bool:
        """Whether no further attempt may be made, or none could be."""
        failures = len(request.broken_on) + len(request.failed_wakes)
        if failures >= self._limits.max_attempts or request.bounces > self._limits.max_bounces:
            return True
        return not self._eligible(request)

    def _refusal(self, request: _Request) -> Rejects | None:
        """Why this request cannot be placed, now or later, as the mesh is; None when it can."""
        arrival = request.arrival
        refusal = refusals.target_refusal(arrival, self._fleet)
        if refusal is not None or self._eligible(request):
            return refusal
        members = refusals.permitted(arrival, self._fleet)
        if request.last_failure is not None and any(self._is_up(member) for member in members):
            return request.last_failure
        return refusals.none_is_up(arrival, members, self._limits.full_retry_seconds)

    def _waiting_for_the_same(self, arrival: Arrival) -> int:
        """How many wait for the pool that this request is for, by whichever name."""
        pool = self._fleet.pool_of(arrival.target)
        return self._queue.count_where(lambda waiting: self._fleet.pool_of(waiting.target) == pool)
