"""The metrics of a process: one page for Prometheus, with bounded labels.

Names and labels are listed in `docs/metrics.md`. Processes without a page do not import this module.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar, cast

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from typing_extensions import override

from weft.kernel.metric_limits import MetricLimits
from weft.kernel.passed_on_metrics import merged
from weft.kernel.tracing import SpanCounts, TraceContext, Tracing

OTHER = "_other"
"""The label of what is beyond a bound. No model, tenant or host can have this name."""

Child = TypeVar("Child", bound=Counter | Histogram)


@dataclass(slots=True)
class _Entry(Generic[Child]):
    child: Child
    was_used: bool = True


class LabelSets(Generic[Child]):
    """One metric with a bounded number of label sets.

    The first label is the one that may have many values. Looking a child up here costs 0.2 us, in the library 2 us.
    """

    def __init__(self, metric: Child, most: int) -> None:
        self._metric = metric
        self._most = most
        self._found: dict[tuple[str, ...], _Entry[Child]] = {}
        self._others: dict[tuple[str, ...], Child] = {}
        self._idle: deque[tuple[str, ...]] = deque()

    def __len__(self) -> int:
        return len(self._found) + len(self._others)

    def of(self, *labels: str) -> Child:
        """Returns the child of a label set, or that of `_other` where there are too many."""
        entry = self._found.get(labels)
        if entry is not None:
            entry.was_used = True
            return entry.child
        if len(self._found) >= self._most and not self._make_room():
            return self._other(labels)
        child = self._child(labels)
        self._found[labels] = _Entry(child)
        return child

    def note_idle(self) -> None:
        """Marks the label sets as idle that were not used since the last call: they make room for new ones."""
        self._idle = deque(labels for labels, entry in self._found.items() if not entry.was_used)
        for entry in self._found.values():
            entry.was_used = False

    def _child(self, labels: tuple[str, ...]) -> Child:
        return cast("Child", self._metric.labels(*labels))

    def _make_room(self) -> bool:
        while self._idle:
            labels = self._idle.popleft()
            if not self._found[labels].was_used:
                del self._found[labels]
                self._metric.remove(*labels)
                return True
        return False

    def _other(self, labels: tuple[str, ...]) -> Child:
        """The other labels have few values each, so few children have `_other`; beyond the bound all are `_other`."""
        wanted = (OTHER, *labels[1:])
        if wanted not in self._others and len(self._others) >= self._most:
            wanted = (OTHER,) * len(labels)
        child = self._others.get(wanted)
        if child is None:
            child = self._others[wanted] = self._child(wanted)
        return child


@dataclass(frozen=True, slots=True)
class RenderedPage:
    """A page in the format that its reader accepts."""

    body: bytes
    content_type: str


class MetricsPage(Collector):
    """The metrics of one process: those of its parts, on one registry."""

    def __init__(self, limits: MetricLimits | None = None) -> None:
        # A third of the lines of counters would be the times of their creation.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.limits = limits or MetricLimits()
        self.registry = CollectorRegistry()
        self._counters: list[LabelSets[Counter]] = []
        self._histograms: list[LabelSets[Histogram]] = []
        self._before: list[Callable[[], Awaitable[None]]] = []
        self._passed_on: list[Callable[[], Iterable[Metric]]] = []

    def counter(self, name: str, meaning: str, labels: Sequence[str]) -> LabelSets[Counter]:
        """Returns a new counter; `labels` begins with the one that may have many values."""
        made = LabelSets(Counter(name, meaning, labels, registry=self.registry), self.limits.max_single_series)
        self._counters.append(made)
        return made

    def histogram(
        self, name: str, meaning: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> LabelSets[Histogram]:
        """Returns a new histogram; `labels` begins with the one that may have many values."""
        metric = Histogram(name, meaning, labels, buckets=buckets, registry=self.registry)
        made = LabelSets(metric, self.limits.max_label_sets)
        self._histograms.append(made)
        return made

    def register(self, collector: Collector) -> None:
        """Adds metrics that are read with each scrape."""
        self.registry.register(collector)

    def before_scrape(self, prepare: Callable[[], Awaitable[None]]) -> None:
        """Awaits `prepare` before each scrape. It must not raise, and must end in bounded time."""
        self._before.append(prepare)

    def pass_on(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Adds metrics of other processes, which may have names that this process has, too: see `passed_on`."""
        self._passed_on.append(read)

    @override
    def collect(self) -> Iterable[Metric]:
        """Returns all metrics, those of one name together. This is what a page needs of a registry."""
        own = self.registry.collect()
        if not self._passed_on:
            return own
        return merged(chain(own, *(read() for read in self._passed_on)))

    def note_idle(self) -> None:
        """Called every `MetricLimits.idle_seconds`: see `LabelSets.note_idle`."""
        for counter in self._counters:
            counter.note_idle()
        for histogram in self._histograms:
            histogram.note_idle()

    async def render(self, accept: str = "") -> RenderedPage:
        """Returns the page, as OpenMetrics with exemplars where the `Accept` header asks for it."""
        for prepare in self._before:
            await prepare()
        encode, content_type = choose_encoder(accept)
        return RenderedPage(encode(self), content_type)


def span_family(counts: SpanCounts) -> Metric:
    """Returns the counter of spans by what became of them."""
    family = CounterMetricFamily("weft_spans", "Spans by what became of them.", labels=("end",))
    for end, count in (("exported", counts.exported), ("dropped", counts.dropped), ("failed", counts.failed)):
        family.add_metric((end,), count)
    return family


class SpanMetrics(Collector):
    """The counter of the spans of a process."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    @override
    def collect(self) -> Iterable[Metric]:
        yield span_family(self._tracing.counts)


def add_bounded(
    family: GaugeMetricFamily | CounterMetricFamily, values: Iterable[tuple[tuple[str, ...], float]], most: int
) -> None:
    """Adds samples to a family of gauges or counters, by labels; those beyond `most` as sums with `_other`."""
    others: dict[tuple[str, ...], float] = {}
    for number, (labels, value) in enumerate(values):
        if number < most:
            family.add_metric(labels, value)
        else:
            wanted = (OTHER, *labels[1:])
            if wanted not in others and len(others) >= most:
                wanted = (OTHER,) * len(labels)
            others[wanted] = others.get(wanted, 0.0) + value
    for labels, value in others.items():
        family.add_metric(labels, value)


def exemplar_of(context: TraceContext | None) -> dict[str, str] | None:
    """Returns the exemplar of a request whose trace is sampled; None: it is not, so that no span would be found."""
    if context is None or not context.is_sampled:
        return None
    return {"trace_id": f"{context.trace_id:032x}"}
