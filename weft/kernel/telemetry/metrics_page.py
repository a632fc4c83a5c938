"""A process's metrics page for Prometheus, with bounded labels, including metrics forwarded from other pages.

`docs/observe.md` lists names and labels. Processes without a page do not import this module.
"""

import asyncio
import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    Exemplar,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    Sample,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from typing_extensions import override

from weft.kernel.settings.metric_limits import MetricLimits
from weft.kernel.telemetry.tracing import TraceContext, Tracing

OTHER = "_other"
"""Label for values beyond a bound. No model, tenant or host can have this name."""
_END = b"# EOF\n"
"""Last line of an OpenMetrics page."""
MAX_PASSED_ON_LABELS = 32
"""Maximum labels of a forwarded series; one with more is dropped."""

Labels = tuple[str, ...]
ReadMetrics = Callable[[], Iterable[Metric]]


class CounterCell:
    """A count, read at scrapes."""

    # The library's children validate, lock and call four times per value.
    __slots__ = ("_count", "is_used")

    def __init__(self) -> None:
        self._count = 0.0
        self.is_used = True

    def inc(self, amount: float = 1.0) -> None:
        """Adds to the count."""
        self._count += amount
        self.is_used = True

    def add_to(self, family: Any, labels: Labels) -> None:
        """Adds the sample to its family."""
        family.add_metric(labels, self._count)


class HistogramCell:
    """A histogram with an exemplar per bucket, read at scrapes."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "_sum", "is_used")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are the upper bounds of the buckets, ascending; the last one is infinite."""
        self._bounds = bounds
        self._counts = [0] * len(bounds)
        self._exemplars: list[Exemplar | None] = [None] * len(bounds)
        self._sum = 0.0
        self.is_used = True

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """Counts a value."""
        bucket = bisect_left(self._bounds, amount)
        self._counts[bucket] += 1
        self._sum += amount
        self.is_used = True
        if exemplar:
            self._exemplars[bucket] = Exemplar(exemplar, amount, time.time())

    def add_to(self, family: Any, labels: Labels) -> None:
        """Adds the samples to their family."""
        buckets = zip(map(floatToGoString, self._bounds), accumulate(self._counts), self._exemplars, strict=True)
        family.add_metric(labels, list(buckets), self._sum)


CellT = TypeVar("CellT", bound=CounterCell | HistogramCell)


class LabelSets(dict[Labels, CellT]):
    """A metric with a bounded number of label sets, each with its cell, or that of `_other` if there are too many.

    Only the first label may have many values. A dict, as each request looks up a dozen cells.
    """

    def __init__(self, new: Callable[[], CellT], most: int) -> None:
        """`new` returns the cell of a new label set."""
        super().__init__()
        self._new = new
        self._most = most
        self._others: set[Labels] = set()
        self._idle: deque[Labels] = deque()

    def __missing__(self, labels: Labels) -> CellT:
        if len(self) - len(self._others) >= self._most and not self._make_room():
            labels = _other(labels, self._others, self._most)
            self._others.add(labels)
        return self.setdefault(labels, self._new())

    def collect(self, family: Metric) -> Iterator[Metric]:
        """Yields a family with the samples added."""
        for labels, cell in self.items():
            cell.add_to(family, labels)
        yield family

    def note_idle(self) -> None:
        """Marks label sets that were not used since the last call as idle, so that new ones may replace them."""
        self._idle = deque(labels for labels, cell in self.items() if not cell.is_used and labels not in self._others)
        for cell in self.values():
            cell.is_used = False

    def _make_room(self) -> bool:
        while self._idle:
            labels = self._idle.popleft()
            if not self[labels].is_used:
                del self[labels]
                return True
        return False


def _other(labels: Labels, known: Collection[Labels], most: int) -> Labels:
    """Replaces the first label by `_other`, since the others have few values; beyond the bound, all of them."""
    wanted = (OTHER, *labels[1:])
    return wanted if wanted in known or len(known) < most else (OTHER,) * len(labels)


@dataclass(frozen=True, slots=True)
class RenderedPage:
    """A page in the format that its reader accepts."""

    body: bytes
    content_type: str


class MetricsPage(Collector):
    """The metrics of a process, from all its parts."""

    def __init__(self, limits: MetricLimits | None = None) -> None:
        self.limits = limits or MetricLimits()
        self._label_sets: list[LabelSets[Any]] = []
        self._before: list[Callable[[], Awaitable[None]]] = []
        self._read: list[ReadMetrics] = []

    def counter(self, name: str, meaning: str, labels: Sequence[str]) -> LabelSets[CounterCell]:
        """Returns a new counter; `name` has no `_total`, and only the first of `labels` may have many values."""
        made = LabelSets(CounterCell, self.limits.max_single_series)
        return self._added(made, partial(CounterMetricFamily, name, meaning, labels=labels))

    def histogram(
        self, name: str, meaning: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> LabelSets[HistogramCell]:
        """Returns a new histogram; only the first of `labels` may have many values."""
        made = LabelSets(partial(HistogramCell, (*buckets, math.inf)), self.limits.max_label_sets)
        return self._added(made, partial(HistogramMetricFamily, name, meaning, labels=labels))

    def _added(self, made: LabelSets[CellT], empty: Callable[[], Metric]) -> LabelSets[CellT]:
        self._label_sets.append(made)
        self.add(lambda: made.collect(empty()))
        return made

    def add(self, read: ReadMetrics) -> None:
        """Adds metrics that are read at each scrape; several sources may use the same name."""
        self._read.append(read)

    def figure(self, name: str, meaning: str, value: float | None) -> Metric:
        """Returns a gauge without labels; without a sample if `value` is None."""
        return GaugeMetricFamily(name, meaning, value=value)

    def gauge(self, name: str, meaning: str, labels: Sequence[str], values: Iterable[tuple[Labels, float]]) -> Metric:
        """Returns a gauge with these values by labels; values beyond the bound of label sets are summed."""
        return self._bounded(GaugeMetricFamily(name, meaning, labels=labels), values)

    def count(self, name: str, meaning: str, labels: Sequence[str], values: Iterable[tuple[Labels, float]]) -> Metric:
        """Returns a counter like `gauge`; `name` has no `_total`."""
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
        """Adds the counts of exported, dropped and failed spans."""

        def collect() -> Iterable[Metric]:
            ends = (((end,), getattr(tracing.counts, end)) for end in ("exported", "dropped", "failed"))
            yield self.count("weft_spans", "Spans by result.", ("end",), ends)

        self.add(collect)

    def before_scrape(self, prepare: Callable[[], Awaitable[None]]) -> None:
        """Awaits `prepare` before each scrape. It must not raise and must take bounded time."""
        self._before.append(prepare)

    @override
    def collect(self) -> Iterator[Metric]:
        """Yields all metrics, merging families of the same name; a family with a different type is dropped."""
        by_name: dict[str, Metric] = {}
        for family in chain.from_iterable(read() for read in self._read):
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
        """Calls `LabelSets.note_idle` of all metrics; call it every `MetricLimits.idle_seconds`."""
        for metric in self._label_sets:
            metric.note_idle()

    async def render(self, accept: str = "") -> RenderedPage:
        """Returns the page, as OpenMetrics with exemplars if the `Accept` header asks for it."""
        for prepare in self._before:
            await prepare()
        encode, content_type = choose_encoder(accept)
        is_openmetrics = content_type.startswith("application/openmetrics-text")
        body = bytearray()
        for family in self.collect():
            body += encode(_Family(family)).removesuffix(_END)
            # A large page takes 0.4 s; let other tasks run.
            await asyncio.sleep(0)
        return RenderedPage(bytes(body) + _END if is_openmetrics else bytes(body), content_type)


@dataclass(frozen=True, slots=True)
class _Family(Collector):
    family: Metric

    @override
    def collect(self) -> Sequence[Metric]:
        return (self.family,)


def exemplar_of(context: TraceContext | None) -> dict[str, str] | None:
    """Returns the exemplar of a request; None if its trace is not sampled and has no spans to link to."""
    if context is None or not context.is_sampled:
        return None
    return {"trace_id": f"{context.trace_id:032x}"}


@dataclass(frozen=True, slots=True)
class PassedOn:
    """The metrics that are forwarded from another process's page."""

    families: tuple[Metric, ...] = ()
    left_out: int = 0
    """Number of families dropped: beyond the bound, or with a refused name."""


def passed_on(
    page: str, labels: Mapping[str, str], *, max_series: int, refused: Collection[str] = (), keeps_own: bool = False
) -> PassedOn:
    """Returns the metrics of a page with `labels` added, whole families up to `max_series` series.

    Parsing stops at the first invalid line. `refused` are prefixes of names to drop. With `keeps_own`, existing labels
    of a series take precedence over `labels`.
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
    # Without its timestamp: Prometheus would reject a page that is forwarded later as too old.
    return Sample(sample.name, {**labels, **own} if keeps_own else {**own, **labels}, sample.value)
