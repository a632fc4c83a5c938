"""The table of live requests: which ones wait, in which queue, until when, and their last status."""

import heapq
from collections.abc import Collection
from math import inf

from router_svc.policy import refusals
from router_svc.policy.decisions import Decision, Rejects
from router_svc.policy.endpoints.candidate_index import CandidateIndex
from router_svc.policy.endpoints.capacity import Capacity
from router_svc.policy.limits import TELL_INTERVAL_SECONDS, SchedulerLimits
from router_svc.policy.loading.load_coordinator import LoadCoordinator
from router_svc.policy.progress.status_notifier import StatusNotifier, StatusSchedule, is_unchanged
from router_svc.policy.progress.wait_estimator import WaitEstimator
from router_svc.policy.queue.admission import Admission
from router_svc.policy.queue.queue import Queue
from router_svc.policy.queue.queues import Queues
from router_svc.policy.queue.request_class import RequestClass
from router_svc.policy.router_request import Request

_SPARE_ENTRIES = 256


class Expiries:
    """Heap with one time per waiting request at which it expires or must be checked, with lazy deletion."""

    def __init__(self) -> None:
        self._at: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def note(self, key: int, at: float) -> None:
        """Set or replace the time of a request."""
        self._at[key] = at
        heapq.heappush(self._heap, (at, key))
        if len(self._heap) > 2 * len(self._at) + _SPARE_ENTRIES:
            self._heap = [(moment, waiting) for waiting, moment in self._at.items()]
            heapq.heapify(self._heap)

    def forget(self, key: int) -> None:
        """Remove a request that no longer waits."""
        self._at.pop(key, None)

    def due(self, now: float) -> list[int]:
        """Return the due requests, each once; one that keeps waiting must be set again."""
        due: list[int] = []
        while self._heap and self._heap[0][0] <= now:
            at, key = heapq.heappop(self._heap)
            if self._at.get(key) == at:
                del self._at[key]
                due.append(key)
        return due


class RequestTable:
    """Admits, queues, expires and releases live requests."""

    def __init__(
        self,
        limits: SchedulerLimits,
        queues: Queues,
        loads: LoadCoordinator,
        estimator: WaitEstimator,
        notifier: StatusNotifier,
        index: CandidateIndex,
    ) -> None:
        self._limits = limits
        self._index = index
        self._queues = queues
        self._loads = loads
        self._estimator = estimator
        self._notifier = notifier
        self.admission = Admission(limits, estimator.slot_wait, estimator.free_slots)
        self._requests: dict[int, Request] = {}
        self.joined: set[str] = set()
        """See `take_joined`. Read-only."""
        self._schedule = StatusSchedule(TELL_INTERVAL_SECONDS, self._waiting)
        self._expiries = Expiries()

    def get(self, key: int) -> Request | None:
        """Return a live request; None: it ended, or is unknown."""
        return self._requests.get(key)

    def live(self, key: int) -> Request:
        """Return a request that must be live."""
        return self._requests[key]

    def queue(self, request: Request) -> Queue:
        """Return the queue of a request."""
        return self._queues.open(request.queue)

    def capacity(self, request: Request) -> Capacity:
        """Return the capacity of its queue for the request."""
        return self._estimator.capacity(self.queue(request), request.kind)

    def _class_of(self, request: Request) -> RequestClass:
        return self.queue(request).classes[request.kind]

    def take_joined(self) -> Collection[str]:
        """Return the queues that requests joined since the last call."""
        joined, self.joined = self.joined, set()
        return joined

    # -- in and out

    def enter(self, request: Request) -> None:
        """Add an arrived request; it neither waits nor runs yet."""
        self._requests[request.key] = request
        self._queues.shares.enter(request.spec.tenant)

    def leave(self, request: Request) -> None:
        """Remove a finished request, which no longer waits or runs."""
        del self._requests[request.key]
        self._queues.shares.leave(request.spec.tenant)

    def enqueue(self, request: Request, now: float) -> None:
        """Queue a request at its position, which is not the end if it waited before."""
        queue = self._queues.add(request, now)
        request_class = self._class_of(request)
        self.joined.add(request.queue)
        request.queued_since = now - request.waited_seconds
        request.in_queue_since = now
        capacity = self._estimator.capacity(queue, request.kind)
        if request_class.waiting == 1:
            self.settle_pause(request_class, capacity, now)
        self._loads.note_demand(request_class, capacity)
        at = min(request.queued_since + self._limits.queue_timeout_seconds, self._longest_wait_ends_at(request))
        self._await_timeout(request, max(now, at))

    def dequeue(self, request: Request, now: float) -> None:
        """Remove a request from its queue."""
        request_class = self._class_of(request)
        request.waited_seconds = now - self._counted_from(request, request_class, now)
        request.in_queue_seconds += now - request.in_queue_since
        self._expiries.forget(request.key)
        self._queues.remove(request, now)
        if not request_class.waiting:
            self._loads.drop_demand(request_class)

    def drop(self, request: Request, rejection: Rejects, now: float) -> Rejects:
        """Refuse a waiting request."""
        self.dequeue(request, now)
        self.leave(request)
        return rejection

    # -- time

    def note_plan(self, now: float) -> None:
        """Apply a new load plan: certain loads pause the queue timeout like those under way."""
        for request_class, capacity in self._loads.demanding():
            self.settle_pause(request_class, capacity, now)

    def settle_pause(self, request_class: RequestClass, capacity: Capacity, now: float) -> None:
        """Pause the queue timeout while a class waits for a certain load, until the load ends.

        Failing loads pause it only for a limited total time.
        """
        is_certain = capacity.waking or capacity.loading or self._loads.is_decided(request_class)
        if not capacity.is_cold or not is_certain:
            may_pause = not capacity.is_cold or request_class.may_pause(now, self._limits.max_load_pause_seconds)
            if request_class.is_paused and may_pause:
                request_class.counted_from = now
            request_class.end_pause(for_good=not capacity.is_cold)
            return
        request_class.begin_pause(now)
        if capacity.loading:
            request_class.awaited_wake, request_class.awaited_began_at = None, inf
        elif request_class.awaited_wake not in capacity.waking:
            request_class.awaited_wake = next(iter(capacity.waking), None)
            began_at = (
                None if request_class.awaited_wake is None else self._loads.wakes.began_at(request_class.awaited_wake)
            )
            request_class.awaited_began_at = inf if began_at is None else began_at

    def expire(self, now: float) -> list[Decision]:
        """Refuse requests whose deadline or queue timeout has passed."""
        decisions: list[Decision] = []
        for key in self._expiries.due(now):
            rejection = self._expiry(self._requests[key], now)
            if rejection is not None:
                decisions.append(self.drop(self._requests[key], rejection, now))
        return decisions

    def _expiry(self, request: Request, now: float) -> Rejects | None:
        request_class = self._class_of(request)
        if request.deadline_at is not None and now >= request.deadline_at:
            return refusals.deadline_passed(request, is_out_of_reach=self._is_out_of_reach(request))
        if request.kind.durable:
            return None
        since = self._counted_from(request, request_class, now)
        at = since + self._limits.queue_timeout_seconds
        most = self._longest_wait_ends_at(request)
        # A wake that began in time is awaited to its end, and then a slot, as after any other load.
        is_due = now >= most and request_class.awaited_began_at >= most
        if now < at and not is_due:
            self._await_timeout(request, min(at, most if now < most else now + TELL_INTERVAL_SECONDS))
            return None
        if is_due:
            since = request.in_queue_since - request.in_queue_seconds
        if self._is_out_of_reach(request):
            return refusals.out_of_reach(request, now - since)
        capacity, gate = self.capacity(request), self._loads.gate_of(request_class)
        refusal = self.admission.timed_out(request, self.queue(request), capacity, now - since, now)
        if gate is None or not capacity.is_cold:
            return refusal
        return refusals.not_loaded(refusal, request, now - since, gate.reason)

    def outlasts(self, request: Request, seconds: float, now: float) -> bool:
        """Whether a pause from now on ends after the queue timeout or the deadline of a request that does not wait."""
        waited = 0.0 if request.kind.durable else request.waited_seconds
        left = self._limits.queue_timeout_seconds - waited
        ends_at = now + left if request.deadline_at is None else min(now + left, request.deadline_at)
        return seconds > 0.0 and now + seconds > ends_at

    def _is_out_of_reach(self, request: Request) -> bool:
        return self._index.is_out_of_reach(request.queue, request.kind.needs)

    def _counted_from(self, request: Request, request_class: RequestClass, now: float) -> float:
        if request_class.stands_still(now, self._limits.max_load_pause_seconds):
            return now
        return max(request.queued_since, request_class.counted_from)

    def _longest_wait_ends_at(self, request: Request) -> float:
        """Return when new loads no longer pause the request's queue timeout."""
        most = self._limits.queue_timeout_seconds + self._limits.max_load_pause_seconds
        return request.in_queue_since + most - request.in_queue_seconds

    def _await_timeout(self, request: Request, at: float) -> None:
        """Schedule a check at `at` or at the deadline. Durable requests have no queue timeout."""
        deadline_at = request.deadline_at
        if not request.kind.durable:
            self._expiries.note(request.key, at if deadline_at is None else min(at, deadline_at))
        elif deadline_at is not None:
            self._expiries.note(request.key, deadline_at)

    # -- status messages

    def notify_due(self, now: float) -> list[Decision]:
        """Send due status messages, and refuse requests that can no longer meet their deadline."""
        decisions: list[Decision] = []
        for request in self._schedule.due(now, self._limits.max_notified_per_tick):
            gate = self._loads.gate_of(self._class_of(request))
            rejection = self._estimator.unreachable(request, self.queue(request), self.capacity(request), gate, now)
            if rejection is None:
                decisions += self.notify(request, now)
            else:
                decisions.append(self.drop(request, rejection, now))
        return decisions

    def notify(self, request: Request, now: float) -> list[Decision]:
        """Send the status of a waiting request if it changed; a durable request gets only one."""
        if not request.waits or (request.kind.durable and request.last_status is not None):
            return []
        queue = self.queue(request)
        message = self._notifier.status(request, queue, self._estimator.capacity(queue, request.kind), now)
        if not request.kind.durable:
            self._schedule.note_sent(request, now)
        if is_unchanged(message, request.last_status):
            return []
        request.last_status = message
        request.has_status = True
        return [message]

    def _waiting(self, key: int) -> Request | None:
        request = self._requests.get(key)
        return request if request is not None and request.waits else None
