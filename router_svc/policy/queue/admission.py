"""Whether one more request may wait, and who makes room for it in a full queue."""

from dataclasses import dataclass

from router_svc.policy import refusals
from router_svc.policy.decisions import Rejects
from router_svc.policy.endpoints.capacity import Capacity
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.queue.live_request import LiveRequest
from router_svc.policy.queue.queue import Queue
from weft.kernel.request import CALLER_BANDS, Priority

LOWEST_FIRST = tuple(sorted(CALLER_BANDS, reverse=True))


@dataclass(frozen=True, slots=True)
class Admitted:
    """One more may wait once this one does not any more; None: there is a place."""

    instead_of: int | None = None


_A_PLACE = Admitted()


class Admission:
    """Looks at a line and decides; it changes nothing."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits

    def in_overload(
        self, request: LiveRequest, queue: Queue, capacity: Capacity, now: float
    ) -> Rejects | Admitted | None:
        """Whether an overloaded queue takes this request: a refusal, or whose place it gets; None: no overload.

        Durable requests take no place of callers and are not bound by the queue timeout.
        """
        slow = None if request.kind.durable else self._too_slow(request, queue, capacity, now)
        if slow is None:
            return None
        better_served = self._better_served(request, queue)
        return slow if better_served is None else Admitted(instead_of=better_served)

    def in_depth(self, request: LiveRequest, queue: Queue, capacity: Capacity, now: float) -> Rejects | Admitted:
        """Whether the depth of the queue has a place for this request: a refusal, a place, or whose place it gets.

        The cost does not depend on the number of waiting requests, unless one of them is evicted.
        """
        if request.kind.durable or queue.callers_waiting < self.depth(capacity):
            return _A_PLACE
        victim = self._victim(request, queue, self.depth(capacity))
        if victim is None:
            return self.full(request, queue, capacity, now)
        return Admitted(instead_of=victim)

    def depth(self, capacity: Capacity) -> int:
        """How many may wait."""
        return self._limits.queue_depth_per_runner * capacity.count

    def full(self, request: LiveRequest, queue: Queue, capacity: Capacity, now: float) -> Rejects:
        """The refusal of one for whom there is no room."""
        wait = queue.grant_rate.average_wait_seconds
        back = self.retry_after(request, queue, now)
        return refusals.queue_full(request.arrival, queue.callers_waiting, self.depth(capacity), wait, back)

    def was_evicted(self, request: LiveRequest, queue: Queue, capacity: Capacity, now: float) -> Rejects:
        """The refusal of one whose place another one got."""
        wait = queue.grant_rate.average_wait_seconds
        back = self.retry_after(request, queue, now)
        return refusals.was_evicted(request.arrival, queue.callers_waiting, self.depth(capacity), wait, back)

    def timed_out(self, request: LiveRequest, queue: Queue, capacity: Capacity, waited: float, now: float) -> Rejects:
        """The refusal of one that waited as long as any may."""
        wait = queue.grant_rate.average_wait_seconds
        back = self.retry_after(request, queue, now)
        return refusals.waited_too_long(
            request.arrival, waited, queue.callers_waiting, self.depth(capacity), wait, back
        )

    def retry_after(self, request: LiveRequest, queue: Queue, now: float) -> float:
        """When its tenant has a turn again, by what is known; else a fixed time."""
        rate = self._own_rate(request, queue, now)
        return refusals.retry_after(self._limits.full_retry_seconds if rate is None else 1.0 / rate)

    def _too_slow(self, request: LiveRequest, queue: Queue, capacity: Capacity, now: float) -> Rejects | None:
        """In overload only as many wait as get their turn before the queue timeout: the others are told at once."""
        if queue.grant_rate.backlogged_seconds(now) < self._limits.overload_after_seconds:
            return None
        expected = max(self._behind_all(request, queue, now), self._behind_own(request, queue, now))
        if expected <= self._limits.overload_fill * self._limits.queue_timeout_seconds:
            return None
        wait = queue.grant_rate.average_wait_seconds
        back = self.retry_after(request, queue, now)
        return refusals.too_slow(request.arrival, expected, queue.callers_waiting, self.depth(capacity), wait, back)

    def _behind_all(self, request: LiveRequest, queue: Queue, now: float) -> float:
        """How long those take who wait and go before it; 0 where the line is in no overload, or nobody knows.

        Of those above it no more than go past its own band before that has a turn.
        """
        if queue.grant_rate.backlogged_seconds(now) < self._limits.overload_after_seconds:
            return 0.0
        rate = queue.grant_rate.grants_per_second(now)
        if rate is None:
            return 0.0
        in_class = self._limits.lower_band_every * (queue.waiting_in(request.arrival.priority) + 1)
        return min(queue.position_of(request), in_class) / rate

    def _behind_own(self, request: LiveRequest, queue: Queue, now: float) -> float:
        """How long its tenant's requests in its band take at their pace, which those who come later leave them."""
        tenant, priority = request.arrival.tenant, request.arrival.priority
        grant_rate = queue.grant_rate_of(tenant, priority)
        if grant_rate is None or grant_rate.backlogged_seconds(now) < self._limits.overload_after_seconds:
            return 0.0
        rate = grant_rate.grants_per_second(now)
        return 0.0 if rate is None else (queue.waiting_of(tenant, priority) + 1) / rate

    def _own_rate(self, request: LiveRequest, queue: Queue, now: float) -> float | None:
        """Turns per second that its tenant has, if all others who wait take theirs; None: unknown."""
        rate = queue.grant_rate.grants_per_second(now)
        return None if rate is None else rate * queue.share_of(request.arrival.tenant)

    def _victim(self, request: LiveRequest, queue: Queue, depth: int) -> int | None:
        """Who makes room in a full queue: of a lower band, of a tenant that was served more, or of a higher band.

        A band keeps as large a part of the places as of the grants, so that those above it neither push the last of it
        out nor keep it out for good. It is the last one of who is ahead of all others in a band that goes.
        """
        priority, kept = request.arrival.priority, depth // self._limits.lower_band_every
        lower = next((each for each in LOWEST_FIRST if each > priority and queue.waiting_in(each) > kept), None)
        if lower is not None:
            return _last_of(queue.last_of_furthest(lower, None, request.cost))
        better_served = self._better_served(request, queue)
        if better_served is not None or queue.waiting_in(priority) >= kept:
            return better_served
        higher = max((each for each in LOWEST_FIRST if each < priority), key=queue.waiting_in, default=None)
        if higher is None or queue.waiting_in(higher) <= kept:
            return None
        return _last_of(queue.last_of_furthest(higher, None, request.cost))

    def _better_served(self, request: LiveRequest, queue: Queue) -> int | None:
        """Who of its band makes room for it: the last one of another tenant, whose turn would come after its own.

        Turns go by accounts, so whoever was served less has a claim to a place, however many others hold.
        """
        priority, tenant = request.arrival.priority, request.arrival.tenant
        if priority is Priority.SYSTEM:
            return None
        furthest = queue.last_of_furthest(priority, tenant, request.cost)
        if furthest is None:
            return None
        after, last = furthest
        own = queue.account_after(tenant, queue.waiting_of(tenant, priority) + 1, request.cost)
        return last if own < after else None


def _last_of(found: tuple[float, int] | None) -> int | None:
    return None if found is None else found[1]
