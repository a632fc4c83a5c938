"""What waiting requests can hope for, and how long that takes as far as anybody knows."""

from collections.abc import Iterator, Sequence

from router_svc.policy.arrival import ROUTE_PREFIX, Arrival
from router_svc.policy.candidate_index import CandidateIndex
from router_svc.policy.candidates import Candidate, Readiness
from router_svc.policy.choice import Considered, Wish
from router_svc.policy.choosing.considering import SAMPLE_SECONDS
from router_svc.policy.estimates import Estimates, wait_seconds
from router_svc.policy.grants import CandidateKey
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.line import MAX_REMEMBERED_KINDS, Line
from router_svc.policy.load_plan import GateWord
from router_svc.policy.mesh_board import MeshBoard
from router_svc.policy.outlook import Outlook, outlook_of
from router_svc.policy.running_work import RunningWork
from router_svc.policy.waiting import Kind, LiveRequest
from router_svc.policy.wakes import WakeBook
from weft.kernel.request import Operation

GENERATES = frozenset({Operation.CHAT, Operation.COMPLETION})
"""Operations whose answers grow token by token."""
Parts = tuple[tuple[str, float], ...]
"""What something takes: words and seconds."""


class Prospects:
    """Looks; it changes nothing but what it remembers of earlier looks."""

    def __init__(
        self,
        index: CandidateIndex,
        board: MeshBoard,
        wakes: WakeBook,
        estimates: Estimates,
        running: RunningWork,
        limits: SchedulerLimits,
    ) -> None:
        self._index = index
        self._board = board
        self._wakes = wakes
        self._estimates = estimates
        self._running = running
        self._limits = limits

    def outlook(self, line: Line, kind: Kind) -> Outlook:
        """The members of a line that requests of this kind may go to."""
        known = line.outlooks.get(kind)
        if known is None:
            members = self._members(line, kind)
            in_order = line.name.startswith(ROUTE_PREFIX)
            preference = self._works if in_order else self._preference
            if len(line.outlooks) >= MAX_REMEMBERED_KINDS:
                line.outlooks.clear()
            known = line.outlooks[kind] = outlook_of(members, self._wakes.is_waking, preference)
        return known

    def wish(self, request: LiveRequest) -> Wish:
        """What it wants of the candidate that is chosen for it."""
        arrival, kind = request.arrival, request.kind
        return Wish(
            needs=kind.needs,
            excluded=self._excluded(kind) if kind.failed_wakes else kind.excluded,
            affinity_key=arrival.affinity_key,
            prefix_digests=arrival.prefix_digests,
            seed=arrival.key,
        )

    def considered(self, line: Line, request: LiveRequest, now: float) -> tuple[Considered, ...]:
        """Who could serve a request and what keeps each from it, at most as old as words about waiting may be."""
        known = line.considered.get(request.kind)
        if known is not None and now < known[0] + self._limits.tell_interval_seconds:
            return known[1]
        seen = self._index.considered(line.name, self.wish(request), now)
        if len(line.considered) >= MAX_REMEMBERED_KINDS:
            line.considered.clear()
        line.considered[request.kind] = (now, seen)
        return seen

    def unwell(self, line: Line, request: LiveRequest, now: float) -> Sequence[tuple[str, str]]:
        """Models that are ready, have a free slot, and get no request; with what keeps it from them, in words."""
        known = line.unwell.get(request.kind)
        if known is not None and now < known[0] + SAMPLE_SECONDS:
            return known[1]
        seen = self._index.unwell(line.name, self.wish(request), now)
        if len(line.unwell) >= MAX_REMEMBERED_KINDS:
            line.unwell.clear()
        line.unwell[request.kind] = (now, seen)
        return seen

    def slot_wait(self, line: Line, outlook: Outlook, position: int, now: float) -> float | None:
        """How long the one at this position waits for a slot of those that take requests; None: nobody knows."""
        rate = line.pace.grants_per_second(now)
        if rate is not None:
            return position / rate
        if outlook.ready is None:
            return None
        return wait_seconds(position - 1, outlook.slots, self._estimates.mean_service_seconds(outlook.ready))

    def told_slot_wait(
        self, request: LiveRequest, line: Line, outlook: Outlook, position: int, now: float
    ) -> float | None:
        """What a request is told of its wait for a slot; None: it is not known.

        An answer that grows token by token takes as long as was asked for, at the speed that was measured. The pace of
        the line goes by what was asked for before, and would promise too much when that was shorter; it is used where
        no lengths were measured, and only when it is steady.
        """
        if request.kind.durable or request.kind.needs.operation not in GENERATES:
            return self.slot_wait(line, outlook, position, now)
        callers = [of for of in line.classes.values() if not of.kind.durable]
        waiting = sum(of.waiting for of in callers)
        mean = sum(of.expected_tokens for of in callers) / waiting if waiting else request.expected_tokens
        wait = self._running.wait_seconds(outlook.takers, outlook.slots, position - 1, mean, now)
        if wait is not None or not line.pace.is_steady(now):
            return wait
        return self.slot_wait(line, outlook, position, now)

    def load_wait(self, outlook: Outlook, gate: GateWord | None, now: float) -> float | None:
        """How long a cold line waits until one of its members takes requests; None: nobody knows."""
        known: list[float] = []
        for model in outlook.waking:
            status = self._wakes.status(model, now, self._usual(model))
            if status.eta_seconds is not None:
                known.append(status.eta_seconds)
        for model in outlook.loading:
            candidate = self._index.candidate(model)
            if candidate is not None and candidate.load_eta_seconds is not None:
                known.append(candidate.load_eta_seconds)
        if known or outlook.waking or outlook.loading:
            return min(known, default=None)
        if gate is not None:
            return gate.eta_seconds
        loads = (self._estimates.load_seconds(candidate) for candidate in outlook.asleep)
        return min((seconds for seconds in loads if seconds is not None), default=None)

    def usual_load(self, candidate: Candidate) -> float | None:
        """How long its load takes; None: nobody knows."""
        return self._estimates.load_seconds(candidate)

    def service(self, candidate: Candidate, arrival: Arrival) -> float | None:
        """How long a request takes there; None: nobody knows."""
        return self._estimates.service_seconds(candidate, arrival)

    def parts(
        self, request: LiveRequest, line: Line, outlook: Outlook, position: int, gate: GateWord | None, now: float
    ) -> Parts:
        """What it takes from now on to serve one that waits or would wait; what nobody knows counts nothing."""
        served_by = outlook.ready or (outlook.asleep[0] if outlook.asleep else None)
        if outlook.ready is not None:
            waits = ("in the queue", self.slot_wait(line, outlook, position, now))
        else:
            waits = ("until a model is loaded", self.load_wait(outlook, gate, now))
        answer = None if served_by is None else self.service(served_by, request.arrival)
        return tuple((what, seconds) for what, seconds in (waits, ("to answer", answer)) if seconds is not None)

    def _excluded(self, kind: Kind) -> frozenset[CandidateKey]:
        """Where it was tried in vain, and what it could not wake as long as that sleeps.

        Not even a primary that its route pins is waited for then.
        """
        failed = (self._index.candidate(model) for model in kind.failed_wakes)
        asleep = {each.key for each in failed if each is not None and each.readiness is Readiness.ASLEEP}
        return kind.excluded | asleep

    def _members(self, line: Line, kind: Kind) -> Iterator[Candidate]:
        members = (
            member
            for member in self._index.permitted(line.name, kind.needs, kind.excluded)
            if not (member.readiness is Readiness.ASLEEP and member.model in kind.failed_wakes)
        )
        route = self._board.route_of(line.name)
        if route is None or not route.pin_primary:
            return members
        everybody, primary = list(members), route.candidates[0]
        pinned = [member for member in everybody if primary in (member.model, member.pool)]
        return iter(pinned or everybody)

    def _usual(self, model: str) -> float | None:
        candidate = self._index.candidate(model)
        return None if candidate is None else self._estimates.load_seconds(candidate)

    def _works(self, candidate: Candidate) -> tuple[object, ...]:
        return (self._wakes.failed_last(candidate.model),)

    def _preference(self, candidate: Candidate) -> tuple[object, ...]:
        failed = self._wakes.failed_last(candidate.model)
        return (failed, self._index.on_runner(candidate), candidate.model, candidate.runner)
