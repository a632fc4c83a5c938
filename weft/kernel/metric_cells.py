"""Counters and histograms of one event loop, with their text. The library's are for threads, and cost more.

A scrape of a mesh with 1,000 models has tens of thousands of lines. A child keeps its lines until it changes.
"""

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from prometheus_client.core import Exemplar, Metric, Sample
from prometheus_client.utils import floatToGoString

_BOUND = "\0"
"""Stands for the bound of a bucket: no label has it."""


class Counter:
    """A counter with its labels."""

    type = "counter"

    def __init__(self, name: str, labels: Mapping[str, str]) -> None:
        self._name = f"{name}_total"
        self._labels = labels
        self._head = f"{self._name}{label_text(labels)} "
        self._value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Adds to it."""
        self._value += amount

    def lines(self, *, with_exemplars: bool) -> str:  # noqa: ARG002 - counters have none
        """Returns its line of a page."""
        return f"{self._head}{number_text(self._value)}\n"

    def add_samples(self, family: Metric) -> None:
        """Adds it to a family of the library."""
        family.samples.append(Sample(self._name, dict(self._labels), self._value))


class Histogram:
    """A histogram with its labels."""

    type = "histogram"

    def __init__(self, name: str, labels: Mapping[str, str], bounds: Sequence[float]) -> None:
        """`bounds` are the upper bounds of its buckets in order, without the infinite one."""
        self._name = name
        self._labels = labels
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._exemplars: dict[int, Exemplar] = {}
        """By bucket, the newest one."""
        self._kept: dict[bool, str] = {}
        """Its lines by whether they have exemplars, until it changes."""

    def observe(self, value: float, exemplar: Mapping[str, str] | None = None) -> None:
        """Counts a value; `exemplar` are the labels of the request that it is of."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        self._sum += value
        if exemplar is not None:
            self._exemplars[bucket] = Exemplar(dict(exemplar), value, time.time())
        if self._kept:
            self._kept.clear()

    def lines(self, *, with_exemplars: bool) -> str:
        """Returns its lines of a page, exemplars only where the format has them."""
        found = self._kept.get(with_exemplars)
        if found is None:
            found = self._kept[with_exemplars] = self._text(with_exemplars=with_exemplars)
        return found

    def _text(self, *, with_exemplars: bool) -> str:
        labels = label_text(self._labels, " ")
        before, after = label_text({**self._labels, "le": _BOUND}, " ").split(_BOUND)
        head = f"{self._name}_bucket{before}"
        total, parts = 0, []
        for number, count in enumerate(self._counts):
            total += count
            bound = number_text(self._bounds[number]) if number < len(self._bounds) else "+Inf"
            exemplar = self._exemplars.get(number) if with_exemplars else None
            parts.append(f"{head}{bound}{after}{total}.0{'' if exemplar is None else _exemplar_text(exemplar)}\n")
        parts.append(f"{self._name}_count{labels}{total}.0\n{self._name}_sum{labels}{number_text(self._sum)}\n")
        return "".join(parts)

    def add_samples(self, family: Metric) -> None:
        """Adds it to a family of the library."""
        total = 0
        for number, count in enumerate(self._counts):
            total += count
            bound = number_text(self._bounds[number]) if number < len(self._bounds) else "+Inf"
            labels = {**self._labels, "le": bound}
            sample = Sample(f"{self._name}_bucket", labels, float(total), exemplar=self._exemplars.get(number))
            family.samples.append(sample)
        family.samples.append(Sample(f"{self._name}_count", dict(self._labels), float(total)))
        family.samples.append(Sample(f"{self._name}_sum", dict(self._labels), self._sum))


def number_text(value: float) -> str:
    """Returns a number as a page has it."""
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text


def label_text(labels: Mapping[str, str], after: str = "") -> str:
    """Returns labels as a page has them, in order of their names, and `after`; `after` alone where there are none."""
    if not labels:
        return after
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items())) + "}" + after


def _exemplar_text(exemplar: Exemplar) -> str:
    return f" # {label_text(exemplar.labels)} {number_text(exemplar.value)} {exemplar.timestamp}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
