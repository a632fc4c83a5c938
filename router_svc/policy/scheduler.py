"""The scheduler: requests and facts in, decisions out. State, but no clock, no I/O and no randomness.

Every method takes `now` (seconds, monotonic) and returns what was decided. One loop owns the scheduler and calls it;
see router_svc/DESIGN.md for the life of a request.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from router_svc.policy.candidates import Candidate, Fleet, Readiness
from router_svc.policy.decisions import Decision, Loads, Placed, Rejects, Waits
from router_svc.policy.failover import FailureKind, classify
from router_svc.policy.queue import Arrival, WaitingQueue
from router_svc.policy.select import least_loaded
from weft.kernel.reasons import Reason

CandidateKey = tuple[str, str, str]

MAX_DOUBLINGS = 16
"""More change nothing and would only overflow in the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Every bound of the scheduler."""

    queue_depth_per_runner: int = 16
    queue_timeout_seconds: float = 30.0
    max_attempts: int = 3
    """Attempts on runners that took the request and failed before any content."""
    max_bounces: int = 8
    """Attempts on runners that did not take it: the view of the mesh was behind."""
    bounce_pause_seconds: float = 0.25
    """How long a runner that bounced a request is left alone."""
    busy_pause_seconds: float = 0.25
    """How long a runner that was unexpectedly full is left alone; doubles each time in a row ..."""
    max_busy_pause_seconds: float = 2.0
    """... up to this. Such a request goes on waiting until the queue timeout."""
    break_pause_seconds: float = 1.0
    """How long a runner that broke is left alone, unless it reports ready as a new incarnation."""
    full_retry_seconds: float = 5.0
    """What a caller is told to wait when the queue is full."""


@dataclass(slots=True)
class _Request:
    arrival: Arrival
    attempt: int
    bounces: int = 0
    placed_on: Candidate | None = None
    broken_on: set[CandidateKey] = field(default_factory=set)
    told: Decision | None = None


class Scheduler:
    """Places requests on candidates: at once when a slot is free and nobody is ahead, otherwise in order."""

    def __init__(self, limits: SchedulerLimits | None = None) -> None:
        self._limits = limits or SchedulerLimits()
        self._fleet = Fleet({})
        self._requests: dict[int, _Request] = {}
        self._queue = WaitingQueue()
        self._in_flight: dict[CandidateKey, int] = {}
        self._last_granted: dict[CandidateKey, float] = {}
        self._paused_until: dict[CandidateKey, float] = {}
        self._busy_in_a_row: dict[CandidateKey, int] = {}

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """How many requests hold a slot."""
        return sum(self._in_flight.values())

    def update_fleet(self, fleet: Fleet, now: float) -> list[Decision]:
        """The mesh changed: serve whoever can be served now, refuse whoever waits in vain."""
        self._fleet = fleet
        alive = {candidate.key for members in fleet.by_name.values() for candidate in members}
        self._last_granted = {key: at for key, at in self._last_granted.items() if key in alive}
        self._paused_until = {key: until for key, until in self._paused_until.items() if key in alive}
        self._busy_in_a_row = {key: count for key, count in self._busy_in_a_row.items() if key in alive}
        return self._serve(now)

    def submit(self, arrival: Arrival, now: float) -> list[Decision]:
        """A request arrived."""
        refusal = self._refusal(arrival)
        if refusal is not None:
            return [refusal]
        request = _Request(arrival, attempt=arrival.attempts_used)
        free = None if self._queue.count_for(arrival.target) else self._free_candidate(request, now)
        if free is not None:
            self._requests[arrival.key] = request
            return [self._place(request, free, now)]
        members = self._eligible(request)
        depth = self._limits.queue_depth_per_runner * len(members)
        if self._queue.count_for(arrival.target) >= depth:
            return [
                Rejects(
                    key=arrival.key,
                    reason=Reason.QUEUE_FULL,
                    message=f"the queue for {arrival.target} is full ({depth} requests wait)",
                    retry_after_seconds=self._limits.full_retry_seconds,
                )
            ]
        self._requests[arrival.key] = request
        self._queue.add(arrival)
        return self._serve(now)

    def report_first_content(self, key: int) -> None:
        """The answer has begun: its runner is not full."""
        request = self._requests.get(key)
        if request is not None and request.placed_on is not None:
            self._busy_in_a_row.pop(request.placed_on.key, None)

    def report_failed(self, key: int, attempt: int, reason: Reason, now: float) -> list[Decision]:
        """An attempt failed before any content: place the request elsewhere, queue it again, or refuse it."""
        request = self._requests.get(key)
        if request is None or request.placed_on is None or request.attempt != attempt:
            return []
        candidate = request.placed_on
        self._release(request)
        kind = classify(reason)
        if kind is FailureKind.BUSY:
            self._pause(candidate, now + self._busy_pause(candidate))
        elif kind is FailureKind.BOUNCED:
            request.bounces += 1
            self._pause(candidate, now + self._limits.bounce_pause_seconds)
        elif kind is FailureKind.BROKE:
            request.broken_on.add(candidate.key)
            self._pause(candidate, now + self._limits.break_pause_seconds)
        if kind is FailureKind.FINAL or self._exhausted(request):
            del self._requests[key]
            rejection = Rejects(key=key, reason=reason, message=f"attempt {attempt} failed and is not repeated")
            return [rejection, *self._serve(now)]
        self._queue.add(request.arrival)
        return self._serve(now)

    def finish(self, key: int, now: float) -> list[Decision]:
        """The request ended or its caller left: whatever it held is free."""
        request = self._requests.pop(key, None)
        if request is None:
            return []
        if request.placed_on is None:
            self._queue.remove(request.arrival)
        else:
            self._release(request)
        return self._serve(now)

    def tick(self, now: float) -> list[Decision]:
        """Time passed: refuse who waited too long, tell the others where they stand."""
        decisions: list[Decision] = []
        for arrival in self._queue:
            expired = self._expiry(arrival, now)
            if expired is not None:
                decisions.append(self._drop(arrival, expired))
        return decisions + self._serve(now)

    def _expiry(self, arrival: Arrival, now: float) -> Rejects | None:
        if arrival.deadline_at is not None and now >= arrival.deadline_at:
            return Rejects(
                key=arrival.key,
                reason=Reason.DEADLINE_EXCEEDED,
                message="the request's deadline passed while it waited",
            )
        waited = now - arrival.arrived_at
        if waited >= self._limits.queue_timeout_seconds:
            return Rejects(
                key=arrival.key,
                reason=Reason.QUEUE_TIMEOUT,
                message=f"no slot for {arrival.target} came free in {waited:.0f} s",
                retry_after_seconds=self._limits.full_retry_seconds,
            )
        return None

    def _drop(self, arrival: Arrival, rejection: Rejects) -> Rejects:
        self._queue.remove(arrival)
        del self._requests[arrival.key]
        return rejection

    def _serve(self, now: float) -> list[Decision]:
        """Place every waiting request that can be placed, in order, and tell the rest what changed for them."""
        decisions: list[Decision] = []
        position = 0
        for arrival in self._queue:
            request = self._requests[arrival.key]
            refusal = self._refusal(arrival)
            if refusal is not None:
                decisions.append(self._drop(arrival, refusal))
                continue
            free = self._free_candidate(request, now)
            if free is not None:
                self._queue.remove(arrival)
                decisions.append(self._place(request, free, now))
                continue
            position += 1
            told = self._waiting_word(request, position)
            if told != request.told:
                request.told = told
                decisions.append(told)
        return decisions

    def _place(self, request: _Request, candidate: Candidate, now: float) -> Placed:
        request.placed_on = candidate
        request.told = None
        request.attempt += 1
        self._in_flight[candidate.key] = self._in_flight.get(candidate.key, 0) + 1
        self._last_granted[candidate.key] = now
        return Placed(key=request.arrival.key, candidate=candidate, attempt=request.attempt)

    def _release(self, request: _Request) -> None:
        candidate = request.placed_on
        assert candidate is not None, "only a placed request holds a slot"
        request.placed_on = None
        left = self._in_flight[candidate.key] - 1
        if left:
            self._in_flight[candidate.key] = left
        else:
            del self._in_flight[candidate.key]

    def _pause(self, candidate: Candidate, until: float) -> None:
        self._paused_until[candidate.key] = until

    def _busy_pause(self, candidate: Candidate) -> float:
        in_a_row = self._busy_in_a_row.get(candidate.key, 0)
        self._busy_in_a_row[candidate.key] = in_a_row + 1
        doublings = min(in_a_row, MAX_DOUBLINGS)
        return min(self._limits.busy_pause_seconds * 2.0**doublings, self._limits.max_busy_pause_seconds)

    def _free_candidate(self, request: _Request, now: float) -> Candidate | None:
        usable = (
            candidate
            for candidate in self._eligible(request)
            if candidate.readiness is Readiness.READY and self._paused_until.get(candidate.key, now) <= now
        )
        return least_loaded(
            usable,
            in_flight=lambda candidate: self._in_flight.get(candidate.key, 0),
            last_granted=lambda candidate: self._last_granted.get(candidate.key, float("-inf")),
        )

    def _eligible(self, request: _Request) -> list[Candidate]:
        arrival = request.arrival
        return [
            candidate
            for candidate in self._fleet.members(arrival.target)
            if arrival.operation in candidate.operations
            and (arrival.allow_remote or not candidate.remote)
            and candidate.readiness is not Readiness.DOWN
            and candidate.key not in request.broken_on
        ]

    def _exhausted(self, request: _Request) -> bool:
        """Whether no further attempt may be made, or none could be."""
        if len(request.broken_on) >= self._limits.max_attempts or request.bounces > self._limits.max_bounces:
            return True
        return not self._eligible(request)

    def _refusal(self, arrival: Arrival) -> Rejects | None:
        """Why this request can never be placed as the mesh is now, if so."""
        members = self._fleet.members(arrival.target)
        if not members:
            return Rejects(
                key=arrival.key,
                reason=Reason.MODEL_NOT_FOUND,
                message=f"no model or pool is called {arrival.target}; there is: {self._fleet.some_names()}",
            )
        able = [candidate for candidate in members if arrival.operation in candidate.operations]
        if not able:
            return Rejects(
                key=arrival.key,
                reason=Reason.UNSUPPORTED_OPERATION,
                message=f"{arrival.target} does not offer {arrival.operation.name.lower()}",
            )
        permitted = [candidate for candidate in able if arrival.allow_remote or not candidate.remote]
        if not permitted:
            return Rejects(
                key=arrival.key,
                reason=Reason.PERMISSION_DENIED,
                message=f"{arrival.target} runs off the premises, and the request does not allow that",
            )
        return self._none_alive(arrival, permitted)

    def _none_alive(self, arrival: Arrival, permitted: Iterable[Candidate]) -> Rejects | None:
        if any(candidate.readiness is not Readiness.DOWN for candidate in permitted):
            return None
        details = "; ".join(
            sorted({f"{candidate.runner}: {candidate.detail}" for candidate in permitted if candidate.detail})
        )
        return Rejects(
            key=arrival.key,
            reason=Reason.NO_RUNNER_AVAILABLE,
            message=f"no runner that serves {arrival.target} is up{f' ({details})' if details else ''}",
            retry_after_seconds=self._limits.full_retry_seconds,
        )

    def _waiting_word(self, request: _Request, position: int) -> Waits | Loads:
        key = request.arrival.key
        eligible = self._eligible(request)
        ready = [candidate for candidate in eligible if candidate.readiness is Readiness.READY]
        loading = [candidate for candidate in eligible if candidate.readiness is Readiness.LOADING]
        if not ready and loading:
            progress = max((c.load_progress for c in loading if c.load_progress is not None), default=None)
            return Loads(key=key, stage=f"{loading[0].model} loads on {loading[0].runner}", progress=progress)
        slots = sum(candidate.slots for candidate in ready)
        return Waits(key=key, position=position, reason=f"all {slots} slots of {request.arrival.target} are busy")
