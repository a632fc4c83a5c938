"""Metrics of another process, passed on with labels of ours: read from its page, with bounds."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric, Sample
from prometheus_client.parser import text_string_to_metric_families

MAX_LABELS = 32
"""Labels of one series; one with more is left out."""


@dataclass(frozen=True, slots=True)
class PassedOn:
    """What is passed on of a page."""

    families: tuple[Metric, ...] = ()
    left_out: int = 0
    """Families that are not: beyond the bound, or not ours to take."""
    is_broken: bool = False
    """Whether the page ended in what is no metric; what came before is passed on."""


def passed_on(
    page: str, labels: Mapping[str, str], *, max_series: int, refused: Collection[str] = (), keeps_own: bool = False
) -> PassedOn:
    """Returns the metrics of a page with `labels` added, whole families up to `max_series` series.

    `refused` are beginnings of names that are not passed on. `keeps_own`: labels that a series has already stay as
    they are; else ours replace them.
    """
    taken: list[Metric] = []
    series = left_out = 0
    try:
        for family in text_string_to_metric_families(page):
            samples = [_labelled(sample, labels, keeps_own=keeps_own) for sample in family.samples]
            fits = series + len(samples) <= max_series and all(len(each.labels) <= MAX_LABELS for each in samples)
            if not fits or family.name.startswith(tuple(refused)):
                left_out += 1
                continue
            series += len(samples)
            metric = Metric(family.name, family.documentation, family.type)
            metric.samples = samples
            taken.append(metric)
    except (ValueError, IndexError):
        return PassedOn(tuple(taken), left_out, is_broken=True)
    return PassedOn(tuple(taken), left_out)


def merged(families: Iterable[Metric]) -> Iterator[Metric]:
    """Yields families with one name as one family, as a page needs them; another type of the same name is left out."""
    by_name: dict[str, Metric] = {}
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found = by_name.get(name)
        if found is None:
            by_name[name] = family
        elif found.type == family.type:
            both = Metric(found.name, found.documentation, found.type)
            both.samples = [*found.samples, *family.samples]
            by_name[name] = both
    yield from by_name.values()


def _labelled(sample: Sample, labels: Mapping[str, str], *, keeps_own: bool) -> Sample:
    own = sample.labels
    # Without its time: a page that is passed on later would be refused as old.
    return Sample(sample.name, {**labels, **own} if keeps_own else {**own, **labels}, sample.value)
