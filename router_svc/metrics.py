"""Prometheus metrics of a router: its queue, its grants and refusals, wakes, the ends of requests, and host memory.

No label comes from a caller: models are names that the mesh knows, or `unknown`.
"""

from collections.abc import Iterator

from google.protobuf.duration_pb2 import Duration
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from router_svc.observer import RouterState, SchedulingObserver
from router_svc.policy.decisions import Placed, Rejects, RequestDecision
from weft.api.common.v1 import receipt_pb2
from weft.dispatch.agents import TargetLabels
from weft.dispatch.fleet import FleetView
from weft.dispatch.placement import PlacementRequest
from weft.kernel.reasons import Reason

WAIT_SECONDS = (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Buckets of waits: from a slot that is free to the load of a large model."""

PROGRAM = "program"
"""The holder of leases that are not a model's: programs choose their own names."""

_OUTCOMES = {number: name.removeprefix("OUTCOME_").lower() for name, number in receipt_pb2.Outcome.items()}


class RouterMetrics(SchedulingObserver):
    """The metrics of one router, on a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._targets = TargetLabels()
        self._ends = Counter(
            "weft_router_requests",
            "Requests that ended, by model, outcome and reason ('completed' where there is none).",
            ("model", "outcome", "reason"),
            registry=self.registry,
        )
        self._grants = Counter(
            "weft_router_grants",
            "Slots granted to requests, by model asked for and priority; one request may get several.",
            ("model", "priority"),
            registry=self.registry,
        )
        self._refusals = Counter(
            "weft_router_refusals",
            "Requests that the scheduler refused, by model and reason.",
            ("model", "reason"),
            registry=self.registry,
        )
        self._failed_attempts = Counter(
            "weft_router_failed_attempts",
            "Attempts that failed before content, by reason.",
            ("reason",),
            registry=self.registry,
        )
        self._wakes = Counter(
            "weft_router_wakes", "Wakes and loads that requests caused, by model.", ("model",), registry=self.registry
        )
        self._failed_wakes = Counter(
            "weft_router_failed_wakes",
            "Of these, the ones that failed, by model and reason.",
            ("model", "reason"),
            registry=self.registry,
        )
        self._left = Counter(
            "weft_router_left_premises",
            "Requests of which bytes left the premises, or may have, by model.",
            ("model",),
            registry=self.registry,
        )
        self._queue_wait = Histogram(
            "weft_router_queue_wait_seconds",
            "From arrival to the last grant, model loads not counted.",
            ("model",),
            buckets=WAIT_SECONDS,
            registry=self.registry,
        )
        self._load_wait = Histogram(
            "weft_router_load_wait_seconds",
            "Time for which requests waited for a model to load; only of those that did.",
            ("model",),
            buckets=WAIT_SECONDS,
            registry=self.registry,
        )
        self._counters: dict[tuple[Counter, tuple[str, ...]], Counter] = {}
        """Counters by their labels, as many as the registry itself has: looking labels up takes some 2 us."""
        self._histograms: dict[tuple[Histogram, str], Histogram] = {}

    @override
    def show(self, state: RouterState) -> None:
        """Shows the state of a router with each scrape."""
        self.registry.register(_StateCollector(state))

    @override
    def note_decision(self, decision: RequestDecision, request: PlacementRequest, view: FleetView) -> None:
        """Counts a grant or a refusal; waits are not counted: each request gets many."""
        if isinstance(decision, Placed):
            self._count(self._grants, self._targets.label(request.model, view), request.priority.name.lower())
        elif isinstance(decision, Rejects):
            self.note_refusal(request, decision.reason, view)

    @override
    def note_wake(self, model: str) -> None:
        """Counts a wake or a load that waiting requests caused."""
        self._count(self._wakes, model)

    @override
    def note_refusal(self, request: PlacementRequest, reason: Reason, view: FleetView) -> None:
        """Counts a refused request."""
        self._count(self._refusals, self._targets.label(request.model, view), reason.name.lower())

    @override
    def note_failed_attempt(self, reason: Reason) -> None:
        """Counts an attempt that failed before any content."""
        self._count(self._failed_attempts, reason.name.lower())

    @override
    def note_failed_wake(self, model: str, reason: Reason) -> None:
        """Counts a wake that failed."""
        self._count(self._failed_wakes, model, reason.name.lower())

    @override
    def note_end(
        self, request: PlacementRequest, reason: Reason, receipt: receipt_pb2.Receipt | None, view: FleetView
    ) -> None:
        """Counts the end of a request, and its waits as its receipt has them; None: its dispatcher is gone."""
        model = self._targets.label(request.model, view)
        outcome = "unknown" if receipt is None else _OUTCOMES[receipt.outcome]
        self._count(self._ends, model, outcome, "completed" if reason is Reason.UNSPECIFIED else reason.name.lower())
        if receipt is None:
            return
        if receipt.left_premises:
            self._count(self._left, model)
        if receipt.attempts:
            self._observe(self._queue_wait, _seconds(receipt.queue_wait), model)
        load_wait = _seconds(receipt.load_wait)
        if load_wait:
            self._observe(self._load_wait, load_wait, model)

    def _count(self, counter: Counter, *labels: str) -> None:
        found = self._counters.get((counter, labels))
        if found is None:
            found = self._counters[counter, labels] = counter.labels(*labels)
        found.inc()

    def _observe(self, histogram: Histogram, seconds: float, model: str) -> None:
        found = self._histograms.get((histogram, model))
        if found is None:
            found = self._histograms[histogram, model] = histogram.labels(model)
        found.observe(seconds)


class _StateCollector(Collector):
    """Gauges that are read when they are scraped."""

    def __init__(self, state: RouterState) -> None:
        self._state = state

    @override
    def collect(self) -> Iterator[Metric]:
        yield from self._queues()
        yield from self._memory()
        counts = self._state.tracing.counts
        spans = CounterMetricFamily("weft_spans", "Spans by what became of them.", labels=("end",))
        for end, count in (("exported", counts.exported), ("dropped", counts.dropped), ("failed", counts.failed)):
            spans.add_metric((end,), count)
        yield spans

    def _queues(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily("weft_router_waiting", "Requests that wait, by pool or route.", labels=("pool",))
        most = GaugeMetricFamily("weft_router_max_waiting", "The most that may wait there.", labels=("pool",))
        running = GaugeMetricFamily("weft_router_running", "Requests that hold a slot there.", labels=("pool",))
        for queue in self._state.queues():
            waiting.add_metric((queue.pool,), queue.waiting)
            most.add_metric((queue.pool,), queue.max_waiting)
            running.add_metric((queue.pool,), queue.running)
        yield from (waiting, most, running)

    def _memory(self) -> Iterator[Metric]:
        total = GaugeMetricFamily("weft_memory_total_bytes", "Accelerator memory that may be leased.", labels=("host",))
        free = GaugeMetricFamily("weft_memory_free_bytes", "Of it, what a lease would get now.", labels=("host",))
        held = GaugeMetricFamily(
            "weft_memory_held_bytes", "Of it, what a model or a program holds.", labels=("host", "holder")
        )
        for host in self._state.hosts().values():
            total.add_metric((host.host,), host.total_bytes)
            free.add_metric((host.host,), host.free_bytes)
            by_holder: dict[str, int] = {}
            for holder in host.holders:
                name = holder.name if holder.is_model else PROGRAM
                by_holder[name] = by_holder.get(name, 0) + holder.held_bytes
            for name, held_bytes in by_holder.items():
                held.add_metric((host.host, name), held_bytes)
        age = GaugeMetricFamily("weft_router_memory_age_seconds", "How old these figures are.")
        seconds = self._state.memory_age_seconds()
        if seconds is not None:
            age.add_metric((), seconds)
        yield from (total, free, held, age)


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
