"""Admission: whether another request may wait in a queue, and which waiting request is evicted for it."""

from collections.abc import Callable

from router_svc.policy.decisions import Rejects
from router_svc.policy.endpoints.capacity import Capacity
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.queue.queue import Queue
from router_svc.policy.refusals import FULL_RETRY_SECONDS, of_queue
from router_svc.policy.router_request import Request
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import CALLER_CLASSES, Priority
from weft.kernel.values.fast_dataclass import fast_dataclass

OVERLOAD_FILL = 0.8
"""Maximum share of the queue timeout that a request's estimated wait may take during overload."""


@fast_dataclass()
class Admitted:
    """A request may wait; `instead_of`: the request evicted for it, None: a place is free."""

    instead_of: int | None = None


_A_PLACE = Admitted()


SlotWait = Callable[[Queue, Capacity, int, float], float | None]
"""Returns the expected wait for a slot at a position of a queue, in seconds; None: unknown."""


class Admission:
    """Decides on admission without changing any state."""

    def __init__(
        self, limits: SchedulerLimits, slot_wait: SlotWait, free_slots: Callable[[Queue, Capacity], int]
    ) -> None:
        self._limits = limits
        self._free_slots = free_slots
        self._slot_wait = slot_wait

    def in_overload(self, request: Request, queue: Queue, capacity: Capacity, now: float) -> Rejects | Admitted | None:
        """Return what an overloaded queue does with this request: refuse it or evict another; None: no overload.

        Durable requests take no place of callers and have no queue timeout.
        """
        slow = None if request.kind.durable else self._too_slow(request, queue, capacity, now)
        if slow is None:
            return None
        better_served = self._better_served(request, queue)
        return slow if better_served is None else Admitted(instead_of=better_served)

    def in_depth(self, request: Request, queue: Queue, capacity: Capacity, now: float) -> Rejects | Admitted:
        """Return what the depth of the queue allows: a refusal, a free place, or the eviction of another request.

        The cost does not depend on the number of waiting requests, unless one is evicted.
        """
        depth = self._depth(queue, capacity)
        if request.kind.durable or queue.callers_waiting < depth:
            return _A_PLACE
        victim = self._victim(request, queue, depth)
        if victim is None:
            message = f"the queue for {request.spec.model} is full ({queue.callers_waiting} requests wait)"
            return self._refuse(request, queue, capacity, message, now)
        return Admitted(instead_of=victim)

    def was_evicted(self, request: Request, queue: Queue, capacity: Capacity, now: float) -> Rejects:
        """Return the refusal of a request that was evicted for another one."""
        message = (
            f"the queue for {request.spec.model} is full; this request was evicted for one of another priority class "
            "of its tenant, or of a tenant that was served less"
        )
        return self._refuse(request, queue, capacity, message, now)

    def timed_out(self, request: Request, queue: Queue, capacity: Capacity, waited: float, now: float) -> Rejects:
        """Return the refusal of a request that reached the queue timeout."""
        message = f"no slot for {request.spec.model} came free in {round(waited, 1):g} s"
        return self._refuse(request, queue, capacity, message, now, Reason.QUEUE_TIMEOUT)

    def _depth(self, queue: Queue, capacity: Capacity) -> int:
        """Return how many may wait: those that wait for prompts although slots are free take no places."""
        return self._limits.queue_depth_per_runner * capacity.count + self._free_slots(queue, capacity)

    def _refuse(
        self,
        request: Request,
        queue: Queue,
        capacity: Capacity,
        message: str,
        now: float,
        reason: Reason = Reason.QUEUE_FULL,
    ) -> Rejects:
        """Return a refusal with the figures of the queue and the time until its tenant's next expected grant.

        By then each other waiting tenant has had its grants.
        """
        rate = queue.grant_rate.grants_per_second(now)
        seconds = FULL_RETRY_SECONDS if rate is None else 1.0 / (rate * queue.share_of(request.spec.tenant))
        return of_queue(
            request,
            message,
            waiting=queue.callers_waiting,
            depth=self._depth(queue, capacity),
            average_wait_seconds=queue.grant_rate.average_wait_seconds,
            retry_seconds=seconds,
            reason=reason,
        )

    def _too_slow(self, request: Request, queue: Queue, capacity: Capacity, now: float) -> Rejects | None:
        """During overload, refuse a request whose expected wait exceeds its part of the queue timeout."""
        if queue.grant_rate.backlogged_seconds(now) < self._limits.overload_after_seconds:
            return None
        expected = max(self._behind_all(request, queue, capacity, now), self._behind_own(request, queue, now))
        if expected <= OVERLOAD_FILL * self._limits.queue_timeout_seconds:
            return None
        words = f"the queue for {request.spec.model} is too long: its turn would come in about {expected:.0f} s"
        return self._refuse(request, queue, capacity, words, now)

    def _behind_all(self, request: Request, queue: Queue, capacity: Capacity, now: float) -> float:
        """Return the expected wait behind all requests that go first, in seconds; 0: unknown."""
        return self._slot_wait(queue, capacity, queue.position_of(request), now) or 0.0

    def _behind_own(self, request: Request, queue: Queue, now: float) -> float:
        """Return the expected wait in seconds behind its tenant's requests in its class; 0: rate not steady."""
        tenant, priority = request.spec.tenant, request.spec.priority
        grant_rate = queue.grant_rate_of(tenant, priority)
        if grant_rate is None or not grant_rate.is_steady(now):
            return 0.0
        if grant_rate.backlogged_seconds(now) < self._limits.overload_after_seconds:
            return 0.0
        rate = grant_rate.grants_per_second(now)
        return 0.0 if rate is None else (queue.waiting_of(tenant, priority) + 1) / rate

    def _victim(self, request: Request, queue: Queue, depth: int) -> int | None:
        """Return the request to evict from a full queue; None: none.

        It is of a tenant that would be served after it, else of its own tenant: of a lower class, else of a higher one.
        A class keeps the same share of a tenant's places as of its grants, so higher classes can neither evict its last
        request nor lock it out.
        """
        better_served = self._better_served(request, queue)
        priority, tenant = request.spec.priority, request.spec.tenant
        if better_served is not None or priority is Priority.SYSTEM:
            return better_served
        every = self._limits.lower_class_every
        kept = min(depth // every, max(1, queue.callers_of(tenant) // every))
        waiting = {each: queue.waiting_of(tenant, each) for each in CALLER_CLASSES}
        others = [each for each in reversed(CALLER_CLASSES) if each != priority and waiting[each] > kept]
        if not others or (others[0] < priority and waiting[priority] >= kept):
            return None
        return queue.last_of(tenant, others[0] if others[0] > priority else max(others, key=waiting.__getitem__))

    def _better_served(self, request: Request, queue: Queue) -> int | None:
        """Return the request to evict for it: the last one of a tenant that would be served after it.

        Grants go by accounts, so a less served tenant is entitled to a place, however many others hold.
        """
        priority, tenant = request.spec.priority, request.spec.tenant
        is_system = priority is Priority.SYSTEM
        furthest = queue.last_of_furthest(None if is_system else tenant, request.cost)
        if furthest is None:
            return None
        after, last = furthest
        own = queue.account_after(tenant, queue.callers_of(tenant) + 1, request.cost)
        return last if is_system or own < after else None
