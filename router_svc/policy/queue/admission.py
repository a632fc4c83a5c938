"""Whether one more request may wait, and who makes room for it in a full queue."""

from dataclasses import dataclass

from router_svc.policy import refusals
from router_svc.policy.decisions import Rejects
from router_svc.policy.endpoints.capacity import Outlook
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.queue.live_request import LiveRequest
from router_svc.policy.queue.queue import Line
from weft.kernel.request import CALLER_BANDS, Priority

LOWEST_FIRST = tuple(sorted(CALLER_BANDS, reverse=True))


@dataclass(frozen=True, slots=True)
class Room:
    """One more may wait once this one does not any more; None: there is a place."""

    instead_of: int | None = None


_A_PLACE = Room()


class Admission:
    """Looks at a line and decides; it changes nothing."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits

    def in_overload(self, request: LiveRequest, line: Line, outlook: Outlook, now: float) -> Rejects | Room | None:
        """Whether an overloaded queue takes this request: a refusal, or whose place it gets; None: no overload.

        Durable requests take no place of callers and are not bound by the queue timeout.
        """
        slow = None if request.kind.durable else self._too_slow(request, line, outlook, now)
        if slow is None:
            return None
        better_served = self._better_served(request, line)
        return slow if better_served is None else Room(instead_of=better_served)

    def in_depth(self, request: LiveRequest, line: Line, outlook: Outlook, now: float) -> Rejects | Room:
        """Whether the depth of the queue has a place for this request: a refusal, a place, or whose place it gets.

        The cost does not depend on the number of waiting requests, unless one of them is evicted.
        """
        if request.kind.durable or line.callers_waiting < self.depth(outlook):
            return _A_PLACE
        victim = self._victim(request, line, self.depth(outlook))
        if victim is None:
            return self.full(request, line, outlook, now)
        return Room(instead_of=victim)

    def depth(self, outlook: Outlook) -> int:
        """How many may wait."""
        return self._limits.queue_depth_per_runner * outlook.count

    def full(self, request: LiveRequest, line: Line, outlook: Outlook, now: float) -> Rejects:
        """The refusal of one for whom there is no room."""
        wait = line.pace.average_wait_seconds
        back = self.retry_after(request, line, now)
        return refusals.queue_full(request.arrival, line.callers_waiting, self.depth(outlook), wait, back)

    def made_room(self, request: LiveRequest, line: Line, outlook: Outlook, now: float) -> Rejects:
        """The refusal of one whose place another one got."""
        wait = line.pace.average_wait_seconds
        back = self.retry_after(request, line, now)
        return refusals.made_room(request.arrival, line.callers_waiting, self.depth(outlook), wait, back)

    def timed_out(self, request: LiveRequest, line: Line, outlook: Outlook, waited: float, now: float) -> Rejects:
        """The refusal of one that waited as long as any may."""
        wait = line.pace.average_wait_seconds
        back = self.retry_after(request, line, now)
        return refusals.waited_too_long(request.arrival, waited, line.callers_waiting, self.depth(outlook), wait, back)

    def retry_after(self, request: LiveRequest, line: Line, now: float) -> float:
        """When its tenant has a turn again, by what is known; else a fixed time."""
        rate = self._own_rate(request, line, now)
        return refusals.retry_after(self._limits.full_retry_seconds if rate is None else 1.0 / rate)

    def _too_slow(self, request: LiveRequest, line: Line, outlook: Outlook, now: float) -> Rejects | None:
        """In overload only as many wait as get their turn before the queue timeout: the others are told at once."""
        if line.pace.backlogged_seconds(now) < self._limits.overload_after_seconds:
            return None
        expected = max(self._behind_all(request, line, now), self._behind_own(request, line, now))
        if expected <= self._limits.overload_fill * self._limits.queue_timeout_seconds:
            return None
        wait = line.pace.average_wait_seconds
        back = self.retry_after(request, line, now)
        return refusals.too_slow(request.arrival, expected, line.callers_waiting, self.depth(outlook), wait, back)

    def _behind_all(self, request: LiveRequest, line: Line, now: float) -> float:
        """How long those take who wait and go before it; 0 where the line is in no overload, or nobody knows.

        Of those above it no more than go past its own band before that has a turn.
        """
        if line.pace.backlogged_seconds(now) < self._limits.overload_after_seconds:
            return 0.0
        rate = line.pace.grants_per_second(now)
        if rate is None:
            return 0.0
        in_band = self._limits.lower_band_every * (line.waiting_in(request.arrival.priority) + 1)
        return min(line.position_of(request), in_band) / rate

    def _behind_own(self, request: LiveRequest, line: Line, now: float) -> float:
        """How long its tenant's requests in its band take at their pace, which those who come later leave them."""
        tenant, band = request.arrival.tenant, request.arrival.priority
        pace = line.pace_of(tenant, band)
        if pace is None or pace.backlogged_seconds(now) < self._limits.overload_after_seconds:
            return 0.0
        rate = pace.grants_per_second(now)
        return 0.0 if rate is None else (line.waiting_of(tenant, band) + 1) / rate

    def _own_rate(self, request: LiveRequest, line: Line, now: float) -> float | None:
        """Turns per second that its tenant has, if all others who wait take theirs; None: unknown."""
        rate = line.pace.grants_per_second(now)
        return None if rate is None else rate * line.share_of(request.arrival.tenant)

    def _victim(self, request: LiveRequest, line: Line, depth: int) -> int | None:
        """Who makes room in a full queue: of a lower band, of a tenant that was served more, or of a higher band.

        A band keeps as large a part of the places as of the grants, so that those above it neither push the last of it
        out nor keep it out for good. It is the last one of who is ahead of all others in a band that goes.
        """
        band, kept = request.arrival.priority, depth // self._limits.lower_band_every
        lower = next((each for each in LOWEST_FIRST if each > band and line.waiting_in(each) > kept), None)
        if lower is not None:
            return _last_of(line.last_of_furthest(lower, None, request.cost))
        better_served = self._better_served(request, line)
        if better_served is not None or line.waiting_in(band) >= kept:
            return better_served
        higher = max((each for each in LOWEST_FIRST if each < band), key=line.waiting_in, default=None)
        if higher is None or line.waiting_in(higher) <= kept:
            return None
        return _last_of(line.last_of_furthest(higher, None, request.cost))

    def _better_served(self, request: LiveRequest, line: Line) -> int | None:
        """Who of its band makes room for it: the last one of another tenant, whose turn would come after its own.

        Turns go by accounts, so whoever was served less has a claim to a place, however many others hold.
        """
        band, tenant = request.arrival.priority, request.arrival.tenant
        if band is Priority.SYSTEM:
            return None
        furthest = line.last_of_furthest(band, tenant, request.cost)
        if furthest is None:
            return None
        after, last = furthest
        own = line.account_after(tenant, line.waiting_of(tenant, band) + 1, request.cost)
        return last if own < after else None


def _last_of(found: tuple[float, int] | None) -> int | None:
    return None if found is None else found[1]
