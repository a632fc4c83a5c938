"""What a change of the mesh means for those who wait."""

from router_svc.policy import refusals
from router_svc.policy.candidate_index import CandidateIndex
from router_svc.policy.decisions import Decision, Rejects
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.line import Line
from router_svc.policy.lines import Lines
from router_svc.policy.load_desk import LoadDesk
from router_svc.policy.mesh_board import MeshBoard, Shift
from router_svc.policy.prospects import Prospects
from router_svc.policy.retry_budget import RetryBudget
from router_svc.policy.waiting import LiveRequest
from router_svc.policy.waiting_room import WaitingRoom


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
            elif self._index.line_of(name) != name:
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
            name = self._index.line_of(request.arrival.target)
            if name is None:
                rejection = refusals.unknown_target(request.arrival, self._board.some_names())
                decisions.append(room.drop(request, rejection, now))
            elif name != request.line:
                room.unqueue(request, now)
                request.line = name
                room.queue(request, now)
        return decisions
