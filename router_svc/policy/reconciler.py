"""What a change of the mesh means for those who wait."""

from dataclasses import replace

from router_svc.policy import refusals
from router_svc.policy.decisions import Decision, Rejects, WakeFailure
from router_svc.policy.endpoints.candidate_index import CandidateIndex
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.endpoints.cluster_view import MeshBoard, Shift
from router_svc.policy.endpoints.failover import RetryBudget
from router_svc.policy.estimates import Estimates
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.loading.load_coordinator import LoadDesk
from router_svc.policy.loading.load_plan import Start
from router_svc.policy.loading.wake_tracker import WakeBook
from router_svc.policy.progress.wait_estimator import Prospects
from router_svc.policy.queue.live_request import LiveRequest
from router_svc.policy.queue.queue import Line
from router_svc.policy.queue.queues import Lines
from router_svc.policy.request_table import WaitingRoom
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority


class Upkeep:
    """Refuses who waits in vain, moves who waits under another name, and keeps the load desk informed."""

    def __init__(
        self,
        limits: SchedulerLimits,
        index: CandidateIndex,
        board: MeshBoard,
        lines: Lines,
        prospects: Prospects,
        desk: LoadDesk,
        retries: RetryBudget,
    ) -> None:
        self._limits = limits
        self._index = index
        self._board = board
        self._lines = lines
        self._prospects = prospects
        self._desk = desk
        self._retries = retries

    def follow(self, shift: Shift, room: WaitingRoom, now: float) -> list[Decision]:
        """What members of these lines can do has changed."""
        decisions = self._rename(room, now) if shift.renames else []
        for name in sorted(shift.lines):
            line = self._lines.get(name)
            if line is None:
                continue
            line.outlooks.clear()
            line.considered.clear()
            line.unwell.clear()
            if line.waiting:
                decisions += self._look(line, room, now)
            elif self._index.table.line_of(name) != name:
                self._lines.drop(name)
                self._retries.forget(name)
        return decisions

    def hopeless(self, request: LiveRequest) -> Rejects:
        """Why nobody can serve it, now or later, as the mesh is."""
        kind, line = request.kind, request.line
        if request.last_failure is not None and any(True for _ in self._index.permitted(line, kind.needs, ())):
            return request.last_failure
        summary = self._index.refusal(line, kind.needs, request.arrival.target)
        return refusals.nobody_can(request.arrival, summary, self._limits.full_retry_seconds)

    def is_exhausted(self, request: LiveRequest, room: WaitingRoom) -> bool:
        """Whether no further attempt may be made, or none could be."""
        if request.failures >= self._limits.max_attempts or request.bounces > self._limits.max_bounces:
            return True
        return not room.outlook(request).count

    def _look(self, line: Line, room: WaitingRoom, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        for of in tuple(line.classes.values()):
            outlook = self._prospects.outlook(line, of.kind)
            if outlook.count:
                room.settle_pause(of, outlook, now)
                self._desk.want(of, outlook)
                continue
            in_vain = map(room.live, of.everybody())
            decisions.extend(room.drop(request, self.hopeless(request), now) for request in in_vain)
        return decisions

    def _rename(self, room: WaitingRoom, now: float) -> list[Decision]:
        """Names may stand for other lines now, or for none."""
        decisions: list[Decision] = []
        for request in [room.live(key) for of in self._lines.classes() for key in of.everybody()]:
            name = self._index.table.line_of(request.arrival.target)
            if name is None:
                rejection = refusals.unknown_target(request.arrival, self._board.some_names())
                decisions.append(room.drop(request, rejection, now))
            elif name != request.line:
                room.unqueue(request, now)
                request.line = name
                room.queue(request, now)
        return decisions


UNSETTLED = WakeFailure(reason=Reason.WAKE_FAILED, message="it woke but did not report ready")


class Waking:
    """Follows every wake from its beginning to its end."""

    def __init__(
        self,
        limits: SchedulerLimits,
        wakes: WakeBook,
        board: MeshBoard,
        lines: Lines,
        desk: LoadDesk,
        estimates: Estimates,
        upkeep: Upkeep,
    ) -> None:
        self._limits = limits
        self._wakes = wakes
        self._board = board
        self._lines = lines
        self._desk = desk
        self._estimates = estimates
        self._upkeep = upkeep

    def begin(self, start: Start, room: WaitingRoom, now: float) -> list[Decision]:
        """A model is to be woken. One for which others give way goes before all other loads of its host."""
        candidate = start.candidate
        priority = Priority.SYSTEM if start.evicts else self._desk.band_for(candidate)
        doubted = self._board.is_doubted(candidate)
        wakes = self._wakes.begin(candidate, now, doubted=doubted, priority=priority, why=start.why)
        return [wakes, *self._refresh(candidate.model, room, now)]

    def succeed(self, model: str, room: WaitingRoom, now: float, *, by_word: bool) -> list[Decision]:
        """A wake succeeded, as its runner says; the mesh has to confirm it, or `by_word` the runner is believed."""
        self._wakes.note_woken(model, now)
        decisions: list[Decision] = []
        if by_word:
            shift = self._board.believe(model, Readiness.READY, now)
            decisions += self._upkeep.follow(shift, room, now)
        self._desk.note_change()
        return decisions + self.settle(room, now)

    def settle(self, room: WaitingRoom, now: float) -> list[Decision]:
        """What was woken is ready, or should be."""
        settled = self._wakes.settle(self._board.readiness_of, now)
        if settled is None:
            return []
        for candidate, seconds in settled.ready:
            # What its runner says now: before its first load it could not say anything.
            usual = self._board.usual_load_of(candidate.model) or candidate.usual_load_seconds
            self._estimates.note_load(replace(candidate, usual_load_seconds=usual), seconds)
        decisions: list[Decision] = []
        for model in settled.loading:
            decisions += self._refresh(model, room, now)
        for model in settled.unsettled:
            decisions += self.fail(model, UNSETTLED, room, now)
        self._desk.note_change()
        return decisions

    def fail(self, model: str, failure: WakeFailure, room: WaitingRoom, now: float) -> list[Decision]:
        """Refuse who waited for this wake and has nothing else left to try.

        For lack of memory nobody is refused, unless the host could never have as much.
        """
        decisions: list[Decision] = []
        lacks_memory = failure.reason is Reason.INSUFFICIENT_MEMORY
        too_large = self._board.larger_than_its_host(model) if lacks_memory else None
        if lacks_memory and too_large is None:
            self._wakes.note_put_off(model)
            self._desk.note_no_memory(model, now)
        elif self._board.readiness_of(model) is None:
            # It is not in the mesh any more: nothing of it is remembered.
            self._wakes.note_put_off(model)
        else:
            waited = [of for of in self._lines.classes() if of.awaited_wake == model]
            self._wakes.note_failed(model)
            self._desk.note_failed(model, now)
            for request in [room.live(key) for of in waited for key in of.everybody()]:
                if too_large is None:
                    refusal = refusals.wake_failed(request.key, model, failure.message)
                else:
                    refusal = refusals.never_fits(request.key, *too_large)
                decisions += self._wait_for_another(request, model, refusal, room, now)
        return decisions + self._refresh(model, room, now)

    def doubt(self, request: LiveRequest, candidate: Candidate, room: WaitingRoom, now: float) -> list[Decision]:
        """A model that is shown as ready and again and again is not: the view is old, and it sleeps."""
        if not candidate.runner_wakes or request.bounces < self._limits.stale_view_bounces:
            return []
        shift = self._board.believe(candidate.model, Readiness.ASLEEP, now)
        return self._upkeep.follow(shift, room, now)

    def _wait_for_another(
        self, request: LiveRequest, model: str, refusal: Rejects, room: WaitingRoom, now: float
    ) -> list[Decision]:
        room.unqueue(request, now)
        request.kind = request.kind.not_waking(model)
        request.failures += 1
        request.last_failure = refusal
        if self._upkeep.is_exhausted(request, room):
            room.leave(request)
            return [refusal]
        room.queue(request, now)
        return []

    def _refresh(self, model: str, room: WaitingRoom, now: float) -> list[Decision]:
        return self._upkeep.follow(self._board.refresh(model, now), room, now)
