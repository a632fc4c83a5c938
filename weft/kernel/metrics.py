"""The metrics of a process: one page for Prometheus, with bounded labels, and metrics passed on from other pages.

Names and labels are listed in `docs/observe.md`. Processes without a page do not import this module.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, Sample
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from typing_extensions import override

from weft.kernel.metric_limits import MetricLimits
from weft.kernel.tracing import TraceContext, Tracing

OTHER = "_other"
"""The label of what is beyond a bound. No model, tenant or host can have this name."""
_END = b"# EOF\n"
"""The last line of a page of OpenMetrics."""
MAX_PASSED_ON_LABELS = 32
"""Labels of one series of another process; one with more is left out."""

MetricT = TypeVar("MetricT", bound=Counter | Histogram)
Labels = tuple[str, ...]
ReadMetrics = Callable[[], Iterable[Metric]]


class LabelSets(Generic[MetricT]):
    """One metric with a bounded number of label sets. The first label is the one that may have many values."""

    def __init__(self, metric: MetricT, most: int) -> None:
        self._metric = metric
        self._most = most
        self._named: set[Labels] = set()
        self._others: set[Labels] = set()
        self._used: set[Labels] = set()
        self._idle: deque[Labels] = deque()

    def __len__(self) -> int:
        return len(self._named) + len(self._others)

    def of(self, *labels: str) -> MetricT:
        """Returns the child of a label set, or that of `_other` where there are too many."""
        if labels not in self._named:
            if len(self._named) < self._most or self._make_room():
                self._named.add(labels)
            else:
                labels = _other(labels, self._others, self._most)
                self._others.add(labels)
        self._used.add(labels)
        child: MetricT = self._metric.labels(*labels)  # type: ignore[assignment]  # the child's class is the parent's
        return child

    def note_idle(self) -> None:
        """Marks the label sets as idle that were not used since the last call: they make room for new ones."""
        self._idle = deque(self._named - self._used)
        self._used.clear()

    def _make_room(self) -> bool:
        while self._idle:
            labels = self._idle.popleft()
            if labels not in self._used:
                self._named.remove(labels)
                self._metric.remove(*labels)
                return True
        return False


def _other(labels: Labels, known: Collection[Labels], most: int) -> Labels:
    """The other labels have few values each, so few label sets have `_other`; beyond the bound all are `_other`."""
    wanted = (OTHER, *labels[1:])
    return wanted if wanted in known or len(known) < most else (OTHER,) * len(labels)


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
        self._label_sets: list[LabelSets[Counter] | LabelSets[Histogram]] = []
        self._before: list[Callable[[], Awaitable[None]]] = []
        self._read: list[ReadMetrics] = []

    def counter(self, name: str, meaning: str, labels: Sequence[str]) -> LabelSets[Counter]:
        """Returns a new counter, without `_total`; `labels` begins with the one that may have many values."""
        made = LabelSets(Counter(name, meaning, labels, registry=self.registry), self.limits.max_single_series)
        self._label_sets.append(made)
        return made

    def histogram(
        self, name: str, meaning: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> LabelSets[Histogram]:
        """Returns a new histogram; `labels` begins with the one that may have many values."""
        metric = Histogram(name, meaning, labels, registry=self.registry, buckets=buckets)
        made = LabelSets(metric, self.limits.max_label_sets)
        self._label_sets.append(made)
        return made

    def add(self, read: ReadMetrics) -> None:
        """Adds metrics that are read with each scrape; they may have names that others on the page have, too."""
        self._read.append(read)

    def figure(self, name: str, meaning: str, value: float | None) -> Metric:
        """Returns a gauge without labels; None: it has no value now."""
        return GaugeMetricFamily(name, meaning, value=value)

    def gauge(self, name: str, meaning: str, labels: Sequence[str], values: Iterable[tuple[Labels, float]]) -> Metric:
        """Returns a gauge with these values by labels; beyond the bound of label sets they are added up."""
        return self._bounded(GaugeMetricFamily(name, meaning, labels=labels), values)

    def count(self, name: str, meaning: str, labels: Sequence[str], values: Iterable[tuple[Labels, float]]) -> Metric:
        """Returns a counter, without `_total`; else as `gauge`."""
        return self._bounded(CounterMetricFamily(name, meaning, labels=labels), values)

    def _bounded(
        self, family: GaugeMetricFamily | CounterMetricFamily, values: Iterable[tuple[Labels, float]]
    ) -> Metric:
        most, others = self.limits.max_single_series, dict[Labels, float]()
        for number, (labels, value) in enumerate(values):
            if number < most:
                family.add_metric(labels, value)
            else:
                other = _other(labels, others, most)
                others[other] = others.get(other, 0.0) + value
        for labels, value in others.items():
            family.add_metric(labels, value)
        return family

    def add_spans(self, tracing: Tracing) -> None:
        """Adds the counts of the process's spans."""

        def collect() -> Iterable[Metric]:
            ends = (((end,), getattr(tracing.counts, end)) for end in ("exported", "dropped", "failed"))
            yield self.count("weft_spans", "Spans by what became of them.", ("end",), ends)

        self.add(collect)

    def before_scrape(self, prepare: Callable[[], Awaitable[None]]) -> None:
        """Awaits `prepare` before each scrape. It must not raise, and must end in bounded time."""
        self._before.append(prepare)

    @override
    def collect(self) -> Iterator[Metric]:
        """Yields all metrics, those of one name as one family; another type of the same name is left out."""
        by_name: dict[str, Metric] = {}
        for family in chain(self.registry.collect(), *(read() for read in self._read)):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found = by_name.get(name)
            if found is None:
                by_name[name] = family
            elif found.type == family.type:
                both = Metric(found.name, found.documentation, found.type)
                both.samples = [*found.samples, *family.samples]
                by_name[name] = both
        yield from by_name.values()

    def note_idle(self) -> None:
        """Called every `MetricLimits.idle_seconds`: see `LabelSets.note_idle`."""
        for metric in self._label_sets:
            metric.note_idle()

    async def render(self, accept: str = "") -> RenderedPage:
        """Returns the page, as OpenMetrics with exemplars where the `Accept` header asks for it."""
        for prepare in self._before:
            await prepare()
        encode, content_type = choose_encoder(accept)
        is_openmetrics = content_type.startswith("application/openmetrics-text")
        body = bytearray()
        for family in self.collect():
            body += encode(_Family(family)).removesuffix(_END)
            # A large page takes 0.4 s: other work goes on meanwhile.
            await asyncio.sleep(0)
        return RenderedPage(bytes(body) + _END if is_openmetrics else bytes(body), content_type)


@dataclass(frozen=True, slots=True)
class _Family(Collector):
    family: Metric

    @override
    def collect(self) -> Sequence[Metric]:
        return (self.family,)


def exemplar_of(context: TraceContext | None) -> dict[str, str] | None:
    """Returns the exemplar of a request whose trace is sampled; None: it is not, so that no span would be found."""
    if context is None or not context.is_sampled:
        return None
    return {"trace_id": f"{context.trace_id:032x}"}


@dataclass(frozen=True, slots=True)
class PassedOn:
    """What is passed on of the page of another process."""

    families: tuple[Metric, ...] = ()
    left_out: int = 0
    """Families that are not: beyond the bound, or not ours to take."""


def passed_on(
    page: str, labels: Mapping[str, str], *, max_series: int, refused: Collection[str] = (), keeps_own: bool = False
) -> PassedOn:
    """Returns the metrics of a page with `labels` added, whole families up to `max_series` series.

    A page that ends in what is no metric is passed on up to there. `refused` are beginnings of names that are not
    passed on. `keeps_own`: labels that a series has already stay as they are; else ours replace them.
    """
    taken: list[Metric] = []
    series = left_out = 0
    try:
        for family in text_string_to_metric_families(page):
            samples = [_labelled(sample, labels, keeps_own=keeps_own) for sample in family.samples]
            fits = series + len(samples) <= max_series
            fits = fits and all(len(each.labels) <= MAX_PASSED_ON_LABELS for each in samples)
            if not fits or family.name.startswith(tuple(refused)):
                left_out += 1
                continue
            series += len(samples)
            metric = Metric(family.name, family.documentation, family.type)
            metric.samples = samples
            taken.append(metric)
    except (ValueError, IndexError):
        pass
    return PassedOn(tuple(taken), left_out)


def _labelled(sample: Sample, labels: Mapping[str, str], *, keeps_own: bool) -> Sample:
    own = sample.labels
    # Without its time: a page that is passed on later would be refused as old.
    return Sample(sample.name, {**labels, **own} if keeps_own else {**own, **labels}, sample.value)
