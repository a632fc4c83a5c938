"""Status messages to waiting requests: immediately when a request begins to wait, then at most one per interval."""

import math
from collections import deque
from collections.abc import Callable, Sequence

from router_svc.policy.decisions import Loads, WaitKind, Waits
from router_svc.policy.endpoints.candidates import Candidate
from router_svc.policy.endpoints.capacity import Capacity
from router_svc.policy.endpoints.cluster_view import ClusterView
from router_svc.policy.endpoints.load_balancer import BestEndpoint
from router_svc.policy.loading.load_coordinator import LoadCoordinator
from router_svc.policy.loading.wake_tracker import WakeStatus
from router_svc.policy.pool_settings import Settings
from router_svc.policy.progress.wait_estimator import WaitEstimator
from router_svc.policy.queue.queue import Queue
from router_svc.policy.queue.queues import Queues
from router_svc.policy.router_request import Request
from weft.kernel.values.units import TENTHS_BELOW_SECONDS, time_words

MAX_UNWELL_NAMED = 3
"""Maximum unhealthy replicas that a message lists."""


def none_is_free(target: str, busy: int, unhealthy: Sequence[tuple[str, str]]) -> str:
    """Return the message for candidates that take no request despite free slots.

    `unhealthy`: their models with the reasons. `busy`: number of others without a free slot.
    """
    named = [f"{model} ({why})" for model, why in unhealthy[:MAX_UNWELL_NAMED]]
    if len(unhealthy) > MAX_UNWELL_NAMED:
        named.append(f"and {len(unhealthy) - MAX_UNWELL_NAMED} more")
    full = [f"{busy} of {busy + len(unhealthy)} replicas have no free slot"] if busy else []
    return f"{target} accepts no requests now: {', '.join([*full, *named])}"


def waits_for_endpoint(best: BestEndpoint, seconds: float) -> str:
    """Return why a request waits for an endpoint while others are free; `seconds`: until its first token."""
    expected, tokens = best.expected, best.expected.prompt_tokens - best.expected.uncached_tokens
    holds = f", which holds {tokens:,} of its {expected.prompt_tokens:,} prompt tokens" if tokens > 0 else ""
    elsewhere = f"; elsewhere {time_words(best.elsewhere_seconds)}" if best.is_elsewhere else ""
    here = f"{best.endpoint.candidate.runner}{holds}: first token in about {time_words(seconds)}"
    return f"waits for {here}{elsewhere}"


def waits_for_load(request: Request, loading: Sequence[Candidate]) -> Loads:
    """Return the status of a request that waits for models that are loading."""
    progress = max((c.load_progress for c in loading if c.load_progress is not None), default=None)
    eta = min((c.load_eta_seconds for c in loading if c.load_eta_seconds is not None), default=None)
    where = f"{loading[0].model} loads on {loading[0].runner}"
    return Loads(key=request.key, stage=where, progress=progress, eta_seconds=shown_seconds(eta))


def waits_for_wake(request: Request, candidate: Candidate, status: WakeStatus) -> Loads:
    """Return the status of a request that waits for a wake."""
    where = f" on {candidate.runner}" if candidate.runner else ""
    elapsed = min(status.elapsed_seconds, status.max_wait_seconds)
    return Loads(
        key=request.key,
        stage=f"waking {candidate.model}{where} ({elapsed:.0f} s of at most {status.max_wait_seconds:.0f} s)",
        progress=candidate.load_progress if status.progress is None else status.progress,
        eta_seconds=shown_seconds(status.eta_seconds),
    )


def is_unchanged(message: Waits | Loads, earlier: Waits | Loads | None) -> bool:
    """Whether a status repeats the earlier one. Considered candidates are sent once and not compared."""
    if isinstance(message, Waits) and isinstance(earlier, Waits):
        shown = (message.position, message.reason, message.eta_seconds)
        return shown == (earlier.position, earlier.reason, earlier.eta_seconds)
    return message == earlier


def shown_seconds(seconds: float | None) -> float | None:
    """Round an estimate up to what users see: tenths of a second below TENTHS_BELOW_SECONDS, else seconds.

    So a barely different estimate is not sent again.
    """
    if seconds is None:
        return None
    exact = round(seconds, 3)
    return math.ceil(exact * 10.0) / 10.0 if exact < TENTHS_BELOW_SECONDS else float(math.ceil(exact))


class StatusSchedule:
    """The order in which waiting requests are examined: FIFO, since all have the same interval."""

    def __init__(self, interval_seconds: float, waiting: Callable[[int], Request | None]) -> None:
        self._interval = interval_seconds
        self._waiting = waiting
        self._next: deque[tuple[float, int]] = deque()

    def note_sent(self, request: Request, now: float) -> None:
        """Record that the request was examined; it is due again after the interval."""
        request.status_at = now + self._interval
        self._next.append((request.status_at, request.key))

    def due(self, now: float, most: int) -> list[Request]:
        """Return the due requests, at most `most`; the caller must record each again."""
        due: list[Request] = []
        while self._next and self._next[0][0] <= now and len(due) < most:
            at, key = self._next.popleft()
            request = self._waiting(key)
            if request is not None and request.status_at == at:
                request.status_at = math.inf
                due.append(request)
        return due


class StatusNotifier:
    """Builds the status of waiting requests."""

    def __init__(
        self, settings: Settings, cluster: ClusterView, queues: Queues, loads: LoadCoordinator, estimator: WaitEstimator
    ) -> None:
        self._settings = settings
        self._index = cluster.index
        self._caps = queues.caps
        self._loads = loads
        self._estimator = estimator

    def status(self, request: Request, queue: Queue, capacity: Capacity, now: float) -> Waits | Loads:
        """Return what the request waits for."""
        tenant = request.spec.tenant
        most, running = self._caps.most(tenant), self._caps.running(tenant)
        if 0 < most <= running:
            reason = f"tenant {tenant} has {running} of {most} requests running"
            return self._waits(request, queue, queue.position_of(request), (WaitKind.TENANT, reason), None, now)
        if capacity.ready is not None:
            return self._slot_status(request, queue, capacity, now)
        request_class = queue.classes.get(request.kind) if request.waits else None
        if request_class is not None and request_class.awaited_wake is not None:
            candidate = self._index.table.candidate(request_class.awaited_wake)
            if candidate is not None:
                usual = self._estimator.estimates.load_seconds(candidate)
                status = self._loads.wakes.status(request_class.awaited_wake, now, usual)
                return waits_for_wake(request, candidate, status)
        loading = [known for model in capacity.loading if (known := self._index.table.candidate(model)) is not None]
        if loading:
            return waits_for_load(request, loading)
        gate = self._loads.gate_of(request_class) if request_class is not None else None
        reason = f"no model of {request.spec.model} is loaded" if gate is None else gate.reason
        eta = None if gate is None else gate.eta_seconds
        return self._waits(request, queue, queue.position_of(request), (WaitKind.MEMORY, reason), eta, now)

    def _slot_status(self, request: Request, queue: Queue, capacity: Capacity, now: float) -> Waits:
        ready = capacity.ready
        assert ready is not None, "a request waits for a slot only where a member is ready"
        position = queue.position_of(request)
        eta = self._estimator.shown_slot_wait(request, queue, capacity, position, now)
        most = self._settings.pool(ready.pool).max_in_flight
        if most and self._index.in_flight_of_queue(ready.pool) >= most:
            kind, reason = WaitKind.POOL, f"pool {ready.pool} has {most} of {most} requests running"
        elif capacity.taker_count == 1 and self._loads.is_held(ready):
            kind, reason, eta = WaitKind.EVICTION, f"{ready.model} is evicted for another model for a turn", None
        elif unhealthy := self._estimator.unhealthy(queue, request, now):
            busy = max(0, capacity.taker_count - len(unhealthy))
            kind, reason = WaitKind.UNHEALTHY, none_is_free(request.spec.model, busy, unhealthy)
            eta = eta if busy else None
        elif request.awaited is not None and (request.awaited.endpoint.is_open or request.awaited.is_elsewhere):
            kind, reason, eta = WaitKind.PROMPT, *self._endpoint_wait(request, request.awaited, queue, now)
        else:
            target, slots = request.spec.model, capacity.slots
            words = f"the slot of {target} is busy" if slots == 1 else f"all {slots} slots of {target} are busy"
            kind, reason = WaitKind.SLOT, words
        return self._waits(request, queue, position, (kind, reason), eta, now)

    def _endpoint_wait(self, request: Request, best: BestEndpoint, queue: Queue, now: float) -> tuple[str, float]:
        """Return why a request waits for an endpoint, and how long until that takes it."""
        prompts = queue.classes[request.kind].prompts[request.spec.priority, request.spec.tenant]
        seconds = prompts.first_token_seconds(request, now)
        own = best.expected.seconds - best.expected.line_seconds - best.expected.wait_seconds
        return waits_for_endpoint(best, seconds), max(0.0, seconds - own)

    def _waits(
        self,
        request: Request,
        queue: Queue,
        position: int,
        why: tuple[WaitKind, str],
        eta: float | None,
        now: float,
    ) -> Waits:
        """Build the status; the first one of a request includes the considered candidates."""
        return Waits(
            key=request.key,
            position=position,
            kind=why[0],
            reason=why[1],
            eta_seconds=shown_seconds(eta),
            considered=() if request.has_status else self._estimator.considered(queue, request, now),
        )
