"""The scheduler: requests and facts in, decisions out. State, but no clock, no I/O and no randomness.

Every method takes `now` (seconds, monotonic) and returns what was decided. One loop owns the scheduler and calls it;
see router_svc/DESIGN.md for the life of a request.
"""

from collections.abc import Iterable
from itertools import islice

from router_svc.policy import refusals
from router_svc.policy.arrival import Arrival
from router_svc.policy.decisions import Decision, Placed, Rejects, Served, StopsWaking, WakeFailure
from router_svc.policy.endpoints.candidate_index import CandidateIndex
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.endpoints.capacity import Outlook
from router_svc.policy.endpoints.cluster_view import MeshBoard, MeshChange
from router_svc.policy.endpoints.failover import FailureKind, RetryBudget, classify
from router_svc.policy.estimates import Estimates
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.loading.load_coordinator import LoadDesk
from router_svc.policy.loading.load_plan import GateWord
from router_svc.policy.loading.wake_tracker import WakeBook
from router_svc.policy.placements import Placements
from router_svc.policy.progress.status_notifier import Announcer
from router_svc.policy.progress.wait_estimator import Prospects, RunningWork
from router_svc.policy.queue.admission import Admission, Room
from router_svc.policy.queue.fair_share import FairShare
from router_svc.policy.queue.live_request import LiveRequest, RequestClass, live_request
from router_svc.policy.queue.queue import Candidacy, Line
from router_svc.policy.queue.queues import Lines, QueueLength, queue_lengths
from router_svc.policy.queue.tenant_caps import TenantCaps
from router_svc.policy.reconciler import Upkeep, Waking
from router_svc.policy.request_table import WaitingRoom
from router_svc.policy.settings import Settings
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation, Priority

TAKING_NO_SLOT = frozenset({Operation.TOKENIZE})
"""Operations that engines do beside their work: where a member is loaded they wait for nobody and cost nothing. Where
none is, they wait for one to wake as any request does."""
MAX_SPREAD_OVER = 16
_DURABLE = Priority.DURABLE
MAX_REVIEWS_AT_ONCE = 3
"""Plans of loads that follow from each other in one step; what is left waits for the next one."""


class Scheduler:
    """Places requests on candidates: at once when a slot is free and nobody is ahead, otherwise in fair order."""

    def __init__(self, limits: SchedulerLimits | None = None, settings: Settings | None = None) -> None:
        limits, settings = limits or SchedulerLimits(), settings or Settings()
        self._limits = limits
        index = self._index = CandidateIndex(settings, limits)
        estimates = self._estimates = Estimates()
        shares = FairShare(
            lambda tenant: settings.tenant(tenant).weight,
            max_lag=limits.max_fair_lag_tokens,
            max_remembered=limits.max_remembered_tenants,
        )
        caps = self._caps = TenantCaps(settings)
        lines = self._lines = Lines(limits, shares, caps)
        wakes = WakeBook(limits.wake_settle_seconds)
        board = self._board = MeshBoard(index, wakes.is_under_way)
        running = RunningWork(estimates)
        prospects = self._prospects = Prospects(index, board, wakes, estimates, running, limits)
        desk = self._desk = LoadDesk(index, board, wakes, estimates, limits, lines.get)
        retries = RetryBudget(limits)
        self._placements = Placements(index, estimates, running, shares, caps, desk, retries)
        self._admission = Admission(limits)
        announcer = Announcer(index, wakes, prospects, desk, caps, settings)
        self._room = WaitingRoom(limits, lines, shares, prospects, desk, self._admission, announcer)
        self._upkeep = Upkeep(limits, index, board, lines, prospects, desk, retries)
        self._waking = Waking(limits, wakes, board, lines, desk, estimates, self._upkeep)

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return self._lines.waiting

    @property
    def running(self) -> int:
        """How many requests hold a slot."""
        return self._index.total_in_flight

    @property
    def needs_ticks(self) -> bool:
        """Whether time alone may decide something: somebody waits, or a load is under way, wanted or not."""
        return bool(self._lines.waiting or self._desk.wakes.under_way)

    @property
    def is_hurried(self) -> bool:
        """Whether a caller waits, or a load is under way: durable requests have time."""
        return bool(self._lines.callers_waiting or self._desk.wakes.under_way)

    def queues(self) -> list[QueueLength]:
        """How much is asked of each pool and route, in order of their names."""
        return queue_lengths(self._index, self._lines, self._limits)

    def apply(self, change: MeshChange, now: float) -> list[Decision]:
        """The mesh changed: serve whoever can be served now, refuse whoever waits in vain."""
        shift = self._board.apply(change, now)
        for model in change.gone:
            self._desk.forget(model)
        decisions = self._waking.settle(self._room, now)
        decisions += self._upkeep.follow(shift, self._room, now)
        if shift.lines or shift.memory:
            self._desk.note_change()
        return decisions + self._go_on(shift.lines, now)

    def submit(self, arrival: Arrival, now: float) -> list[Decision]:
        """A request arrived."""
        decisions = self._waking.settle(self._room, now)
        name = self._index.table.line_of(arrival.target)
        if name is None:
            return [*decisions, refusals.unknown_target(arrival, self._board.some_names())]
        line = self._lines.open(name)
        request = self._received(arrival, line, now)
        self._room.enter(request)
        if arrival.needs.operation in TAKING_NO_SLOT and (ready := self._first_ready(request)) is not None:
            return [*decisions, self._placements.place_beside(request, ready, now)]
        may_run = not line.keeps_waiting(arrival.priority) and self._caps.may_run(arrival.tenant)
        if may_run and self._index.has_free(name):
            placed = self._place_directly(request, line, now)
            if placed is not None:
                return [*decisions, placed, *self._go_on((), now)]
        decisions += self._take_in(request, line, now)
        if request.waits_in is not None:
            decisions += self._go_on((), now)
            decisions += self._room.tell(request, now)
        return decisions

    def report_first_content(self, key: int, now: float) -> None:
        """The answer has begun: its runner is not full."""
        request = self._room.get(key)
        if request is not None:
            self._placements.note_content(request, now)

    def report_failed(self, key: int, attempt: int, reason: Reason, now: float) -> list[Decision]:
        """An attempt failed before any content: place the request elsewhere, queue it again, or refuse it."""
        request = self._room.get(key)
        if request is None or request.placed_on is None or request.attempt != attempt:
            return []
        candidate, is_relieved = self._placements.take_back(request, now)
        freed = self._lines.list_again(request.arrival.tenant) if is_relieved else set()
        kind = classify(reason)
        self._placements.note_failed(request, candidate, reason, now)
        rejection = refusals.attempt_failed(key, attempt, reason)
        decisions: list[Decision] = []
        if kind is FailureKind.BOUNCED:
            request.bounces += 1
            if reason is Reason.BACKEND_NOT_READY:
                decisions += self._waking.doubt(request, candidate, self._room, now)
        elif kind in (FailureKind.BROKE, FailureKind.LACKS):
            request.failures += kind is FailureKind.BROKE
            request.is_retry |= kind is FailureKind.BROKE
            request.kind = request.kind.without(candidate.key)
            request.last_failure = rejection
        if kind is FailureKind.FINAL or self._upkeep.is_exhausted(request, self._room):
            self._room.leave(request)
            decisions.append(rejection)
        else:
            self._room.queue(request, now)
        decisions += self._go_on(freed, now)
        return decisions + self._room.tell(request, now)

    def finish(
        self, key: int, now: float, served: Served | None = None, failure: Reason | None = None
    ) -> list[Decision]:
        """The request ended or its caller left: whatever it held is free. A wake that it waited for goes on.

        `served`: what it took; None: nobody knows, or it was not served. `failure`: what ended it, if it ended badly.
        """
        request = self._room.get(key)
        if request is None:
            return []
        freed: set[str] = set()
        if request.waits_in is not None:
            self._room.unqueue(request, now)
        elif request.placed_on is not None and self._placements.end(request, served, failure, now):
            freed = self._lines.list_again(request.arrival.tenant)
        self._room.leave(request)
        return self._go_on(freed, now)

    def wake_finished(
        self, model: str, failure: WakeFailure | None, now: float, *, by_word: bool = False
    ) -> list[Decision]:
        """A wake ended: with a failure; or without, and the fleet shows the model ready now or within the settle time.

        `by_word`: its runner insists that it is awake, so it counts as ready until the registry has news of it.
        """
        if failure is None:
            decisions = self._waking.succeed(model, self._room, now, by_word=by_word)
        else:
            decisions = self._waking.fail(model, failure, self._room, now)
        return decisions + self._go_on((), now)

    def tick(self, now: float) -> list[Decision]:
        """Time passed: refuse who waited too long or waits in vain, serve and tell the others."""
        self._index.health.advance(now)
        decisions = self._waking.settle(self._room, now)
        decisions += self._room.expire(now)
        self._desk.note_time()
        decisions += self._go_on([line.name for line in self._lines.backlogged()], now)
        return decisions + self._room.tell_due(now)

    def _received(self, arrival: Arrival, line: Line, now: float) -> LiveRequest:
        route = self._board.route_of(line.name)
        deadline_at = arrival.deadline_at
        is_durable = arrival.priority is _DURABLE
        if route is not None and route.budget_seconds is not None and not is_durable:
            end = arrival.arrived_at + route.budget_seconds
            deadline_at = end if deadline_at is None else min(deadline_at, end)
        pool = line.name if route is None else route.candidates[0]
        output = self._estimates.output_tokens(pool, arrival.tenant, arrival.max_output_tokens)
        request = live_request(
            arrival,
            line.name,
            line.kind_of(arrival.needs, durable=is_durable),
            deadline_at=deadline_at,
            cost=arrival.prompt_tokens + output,
            keep_alive_seconds=None if route is None else route.keep_alive_seconds,
            now=now,
        )
        request.expected_tokens = self._estimates.expected_tokens(pool, arrival.tenant, arrival.max_output_tokens)
        return request

    def _first_ready(self, request: LiveRequest) -> Candidate | None:
        """Who is loaded and has what is needed, the first of a route's entries; None: nobody is loaded.

        Requests are spread over those of the same pool, as far as they are among the first few.
        """
        permitted = self._index.permitted(request.line, request.kind.needs, request.kind.excluded)
        found = list(islice((each for each in permitted if each.readiness is Readiness.READY), MAX_SPREAD_OVER))
        same_pool = [each for each in found if each.pool == found[0].pool]
        return same_pool[request.key % len(same_pool)] if same_pool else None

    def _place_directly(self, request: LiveRequest, line: Line, now: float) -> Decision | None:
        """Nobody is ahead and somebody is free: no need to wait. None: nobody is free for this one."""
        choice = self._index.choose(line.name, self._prospects.wish(request), now)
        if choice is None:
            return None
        late = self._prospects.too_late(request, choice.candidate, now)
        if late is not None:
            self._room.leave(request)
            return late
        line.note_placed(request.arrival.priority, request.waited_seconds, now)
        return self._placements.place(request, choice, now)

    def _take_in(self, request: LiveRequest, line: Line, now: float) -> list[Decision]:
        """Let it wait, or refuse it; one that waits may have to leave for it."""
        outlook = self._prospects.outlook(line, request.kind)
        if not outlook.count:
            self._room.leave(request)
            return [self._upkeep.hopeless(request)]
        if request.kind.durable and self._lines.durable_waiting >= self._limits.max_durable_waiting:
            self._room.leave(request)
            return [refusals.too_many_durable(request.arrival, self._lines.durable_waiting, self._limits)]
        # Only who has a deadline is asked whether a load that is put off ends in time.
        of = None if request.deadline_at is None else line.classes.get(request.kind)
        gate = None if of is None else self._desk.gate_of(of)
        admitted = self._admit(request, line, outlook, gate, now)
        if isinstance(admitted, Rejects):
            self._room.leave(request)
            return [admitted]
        self._room.queue(request, now)
        if admitted.instead_of is None:
            return []
        victim = self._room.live(admitted.instead_of)
        return [self._room.drop(victim, self._admission.made_room(victim, line, outlook, now), now)]

    def _admit(
        self, request: LiveRequest, line: Line, outlook: Outlook, gate: GateWord | None, now: float
    ) -> Rejects | Room:
        overload = self._admission.in_overload(request, line, outlook, now)
        if isinstance(overload, Rejects):
            return overload
        unreachable = self._prospects.unreachable(request, line, outlook, gate, now)
        if unreachable is not None:
            return unreachable
        return overload or self._admission.in_depth(request, line, outlook, now)

    def _go_on(self, names: Iterable[str], now: float) -> list[Decision]:
        """Serve these lines and whichever have somebody free, and see to loads."""
        decisions = self._serve(names, now)
        for _ in range(MAX_REVIEWS_AT_ONCE):
            if not self._desk.is_due(now):
                break
            plan, lifted = self._desk.review(now)
            self._room.note_plan(now)
            for start in plan.begin:
                decisions += self._waking.begin(start, self._room, now)
            decisions += (StopsWaking(model=model) for model in plan.give_up)
            if lifted:
                decisions += self._serve((), now)
        return decisions

    def _serve(self, names: Iterable[str], now: float) -> list[Decision]:
        """Place everybody of these lines who can be placed, the one whose turn it is first."""
        self._index.health.advance(now)
        # Most who join a line do so because nobody there is free.
        joined = filter(self._index.has_free, self._room.take_joined())
        lines = self._lines.backlogged_of({*names, *joined, *self._index.table.take_freed()})
        if not lines:
            return []
        blocked: set[RequestClass] = set()
        decisions: list[Decision] = []
        while True:
            first: Candidacy | None = None
            for line in lines:
                if line.waiting and self._index.has_free(line.name):
                    for turn in line.candidacies(blocked, now):
                        if first is None or turn.rank < first.rank:
                            first = turn
            if first is None:
                return decisions
            decision = self._try(first, now)
            if decision is None:
                blocked.add(first.of)
            else:
                decisions.append(decision)
                if len(lines) > 1 and isinstance(decision, Placed):
                    self._note_passed_over(first, decision.candidate, lines)

    def _note_passed_over(self, granted: Candidacy, candidate: Candidate, lines: Iterable[Line]) -> None:
        """Other lines wanted that slot too: their lower bands get theirs in time, as those of the line itself do."""
        wanting = self._index.table.lines_of(candidate)
        others = [line for line in lines if line.waiting and line.name in wanting and line.name != granted.of.line]
        for line in others:
            line.note_passed_over(granted.band, 1.0 / len(others))

    def _try(self, chosen: Candidacy, now: float) -> Decision | None:
        """Place one whose turn it is; None: nobody is free for it."""
        request = self._room.live(chosen.turn.key)
        choice = self._index.choose(request.line, self._prospects.wish(request), now)
        if choice is None:
            return None
        if not self._placements.may_try(request, choice.candidate, now):
            assert request.last_failure is not None, "who tries again has failed"
            return self._room.drop(request, request.last_failure, now)
        line = self._lines.open(request.line)
        waited = now - request.arrival.arrived_at
        line.note_grant(chosen, waited, now)
        self._room.unqueue(request, now)
        return self._placements.place(request, choice, now)
