"""Who is told when where it stands: at once when it begins to wait, and from then on at most once per interval."""

import math
from collections import deque
from collections.abc import Callable

from router_svc.policy import words
from router_svc.policy.candidate_index import CandidateIndex
from router_svc.policy.decisions import Loads, Waits
from router_svc.policy.line import Line
from router_svc.policy.load_desk import LoadDesk
from router_svc.policy.outlook import Outlook
from router_svc.policy.prospects import Prospects
from router_svc.policy.settings import Settings
from router_svc.policy.tenant_caps import TenantCaps
from router_svc.policy.waiting import LiveRequest
from router_svc.policy.wakes import WakeBook


class Rounds:
    """The order in which those who wait are looked at. All wait for the same interval, so it is a simple queue."""

    def __init__(self, interval_seconds: float, waiting: Callable[[int], LiveRequest | None]) -> None:
        self._interval = interval_seconds
        self._waiting = waiting
        self._next: deque[tuple[float, int]] = deque()

    def note_told(self, request: LiveRequest, now: float) -> None:
        """It was looked at; its next turn is in an interval."""
        request.tell_at = now + self._interval
        self._next.append((request.tell_at, request.key))

    def due(self, now: float, most: int) -> list[LiveRequest]:
        """Whose turn it is, at most so many; each must be noted again."""
        due: list[LiveRequest] = []
        while self._next and self._next[0][0] <= now and len(due) < most:
            at, key = self._next.popleft()
            request = self._waiting(key)
            if request is not None and request.tell_at == at:
                request.tell_at = math.inf
                due.append(request)
        return due


class Announcer:
    """Finds the word for one who waits."""

    def __init__(
        self,
        index: CandidateIndex,
        wakes: WakeBook,
        prospects: Prospects,
        desk: LoadDesk,
        caps: TenantCaps,
        settings: Settings,
    ) -> None:
        self._index = index
        self._wakes = wakes
        self._prospects = prospects
        self._desk = desk
        self._caps = caps
        self._settings = settings

    def word(self, request: LiveRequest, line: Line, outlook: Outlook, now: float) -> Waits | Loads:
        """What it waits for, now."""
        arrival = request.arrival
        tenant_most = self._caps.most(arrival.tenant)
        if tenant_most and self._caps.running(arrival.tenant) >= tenant_most:
            reason = words.tenant_is_full(arrival.tenant, self._caps.running(arrival.tenant), tenant_most)
            return self._waits(request, line, line.position_of(request), reason, None, now)
        if outlook.ready is not None:
            return self._word_of_slots(request, line, outlook, now)
        of = request.waits_in
        if of is not None and of.awaited_wake is not None:
            candidate = self._index.candidate(of.awaited_wake)
            if candidate is not None:
                usual = self._prospects.usual_load(candidate)
                return words.waits_for_wake(arrival, candidate, self._wakes.status(of.awaited_wake, now, usual))
        loading = [known for model in outlook.loading if (known := self._index.candidate(model)) is not None]
        if loading:
            return words.waits_for_load(arrival, loading)
        gate = self._desk.gate_of(of) if of is not None else None
        reason = words.nothing_is_loaded(arrival.target) if gate is None else gate.reason
        eta = None if gate is None else gate.eta_seconds
        return self._waits(request, line, line.position_of(request), reason, eta, now)

    def _word_of_slots(self, request: LiveRequest, line: Line, outlook: Outlook, now: float) -> Waits:
        ready = outlook.ready
        assert ready is not None, "only where somebody takes requests are there slots to wait for"
        position = line.position_of(request)
        eta = self._prospects.told_slot_wait(request, line, outlook, position, now)
        most = self._settings.pool(ready.pool).max_in_flight
        if most and self._index.in_flight_of_line(ready.pool) >= most:
            reason = words.pool_is_full(ready.pool, most)
        elif outlook.taker_count == 1 and self._desk.is_held(ready):
            reason, eta = words.gives_way(ready.model), None
        elif unwell := self._prospects.unwell(line, request, now):
            busy = max(0, outlook.taker_count - len(unwell))
            reason = words.nobody_is_free(request.arrival.target, busy, unwell)
            eta = eta if busy else None
        else:
            reason = words.slots_are_busy(request.arrival.target, outlook.slots)
        return self._waits(request, line, position, reason, eta, now)

    def _waits(
        self, request: LiveRequest, line: Line, position: int, reason: str, eta: float | None, now: float
    ) -> Waits:
        """With who could serve it, if it is the first word."""
        return Waits(
            key=request.key,
            position=position,
            reason=reason,
            eta_seconds=words.whole(eta),
            considered=() if request.was_told else self._prospects.considered(line, request, now),
        )
