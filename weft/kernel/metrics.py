"""The metrics of a process: one page for Prometheus, with bounded labels.

Names and labels are listed in `docs/metrics.md`. Processes without a page do not import this module.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from typing_extensions import override

from weft.kernel.metric_cells import Counter, Histogram
from weft.kernel.metric_limits import MetricLimits
from weft.kernel.passed_on_metrics import merged
from weft.kernel.tracing import SpanCounts, TraceContext, Tracing

OTHER = "_other"
"""The label of what is beyond a bound. No model, tenant or host can have this name."""

COUNTER, HISTOGRAM = Counter.type, Histogram.type
Child = TypeVar("Child", bound=Counter | Histogram)


@dataclass(slots=True)
class _Entry(Generic[Child]):
    child: Child
    was_used: bool = True


class LabelSets(Generic[Child]):
    """One metric with a bounded number of label sets. The first label is the one that may have many values."""

    def __init__(
        self, name: str, meaning: str, labels: Sequence[str], most: int, make: Callable[[str, Mapping[str, str]], Child]
    ) -> None:
        """`make` makes the child of a label set, from the name of the metric and the labels."""
        self.name = name
        self._meaning = meaning
        self._labels = tuple(labels)
        self._most = most
        self._make = make
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

    def text(self, kind: str, *, is_openmetrics: bool) -> str:
        """Returns its part of a page; `kind` is the type of the metric."""
        shown = f"{self.name}_total" if kind == COUNTER and not is_openmetrics else self.name
        head = f"# HELP {shown} {self._meaning}\n# TYPE {shown} {kind}\n"
        return head + "".join([child.lines(with_exemplars=is_openmetrics) for child in self._children()])

    def family(self, kind: str) -> Metric:
        """Returns it as a family of the library."""
        family = Metric(self.name, self._meaning, kind)
        for child in self._children():
            child.add_samples(family)
        return family

    def _children(self) -> Iterator[Child]:
        yield from (entry.child for entry in self._found.values())
        yield from self._others.values()

    def _child(self, labels: tuple[str, ...]) -> Child:
        return self._make(self.name, dict(zip(self._labels, labels, strict=True)))

    def _make_room(self) -> bool:
        while self._idle:
            labels = self._idle.popleft()
            if not self._found[labels].was_used:
                del self._found[labels]
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
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.limits = limits or MetricLimits()
        self.registry = CollectorRegistry()
        self._counters: list[LabelSets[Counter]] = []
        self._histograms: list[LabelSets[Histogram]] = []
        self._before: list[Callable[[], Awaitable[None]]] = []
        self._passed_on: list[Callable[[], Iterable[Metric]]] = []

    def counter(self, name: str, meaning: str, labels: Sequence[str]) -> LabelSets[Counter]:
        """Returns a new counter, without `_total`; `labels` begins with the one that may have many values."""
        made = LabelSets(name, meaning, labels, self.limits.max_single_series, Counter)
        self._counters.append(made)
        return made

    def histogram(
        self, name: str, meaning: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> LabelSets[Histogram]:
        """Returns a new histogram; `labels` begins with the one that may have many values."""
        make = partial(Histogram, bounds=tuple(buckets))
        made = LabelSets(name, meaning, labels, self.limits.max_label_sets, make)
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
    def collect(self) -> Iterator[Metric]:
        """Returns all metrics, those of one name together."""
        own = (metric.family(kind) for kind, metric in self._own())
        yield from merged(chain(own, self.registry.collect(), *(read() for read in self._passed_on)))

    def _own(self) -> Iterator[tuple[str, LabelSets[Counter] | LabelSets[Histogram]]]:
        yield from ((COUNTER, counter) for counter in self._counters)
        yield from ((HISTOGRAM, histogram) for histogram in self._histograms)

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
        is_openmetrics = content_type.startswith("application/openmetrics-text")
        passed_on = [family for read in self._passed_on for family in read()]
        names = {family.name for family in passed_on}
        own, texts = [], []
        for kind, metric in self._own():
            if metric.name in names:
                own.append(metric.family(kind))
            else:
                texts.append(metric.text(kind, is_openmetrics=is_openmetrics))
        rest = encode(_Families(list(merged(chain(own, self.registry.collect(), passed_on)))))
        return RenderedPage("".join(texts).encode() + rest, content_type)


@dataclass(frozen=True, slots=True)
class _Families(Collector):
    families: Sequence[Metric]

    @override
    def collect(self) -> Sequence[Metric]:
        return self.families


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
