"""Wakes: begun as planned, confirmed by the mesh, and what becomes of those who waited for one that failed."""

from dataclasses import replace

from router_svc.policy import refusals
from router_svc.policy.candidates import Candidate, Readiness
from router_svc.policy.decisions import Decision, Rejects, WakeFailure
from router_svc.policy.estimates import Estimates
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.lines import Lines
from router_svc.policy.load_desk import LoadDesk
from router_svc.policy.load_plan import Start
from router_svc.policy.mesh_board import MeshBoard
from router_svc.policy.upkeep import Upkeep
from router_svc.policy.waiting import LiveRequest
from router_svc.policy.waiting_room import WaitingRoom
from router_svc.policy.wakes import WakeBook
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority

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
