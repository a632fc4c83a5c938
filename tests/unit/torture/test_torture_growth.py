"""Whether what a mesh uses grows over a run."""

from dataclasses import replace

import pytest

from tools.torture.checker import rules_broken
from tools.torture.growth import Sample, grown, growths

FIRST = Sample(
    seconds=0.0, processes=9, memory_bytes=500_000_000, descriptors=300, threads=120, disk_bytes=10_000_000, tasks=0
)


def _samples(**per_sample: float) -> list[Sample]:
    """Samples over 1,000 s, with a figure that grows by so much from one to the next; every 5 s a task."""
    return [
        replace(
            FIRST,
            seconds=5.0 * number,
            tasks=number,
            **{name: getattr(FIRST, name) + number % 3 + int(step * number) for name, step in per_sample.items()},
        )
        for number in range(200)
    ]


def test_figures_that_vary_and_do_not_grow_are_flat() -> None:
    found = growths(_samples(memory_bytes=1000, descriptors=0, threads=0, disk_bytes=2000))
    assert grown(found) == []
    assert [each.is_flat for each in found] == [True] * 4


@pytest.mark.parametrize(
    ("figure", "step"),
    [("memory_bytes", 1_000_000.0), ("descriptors", 0.5), ("threads", 0.2), ("disk_bytes", 50_000.0)],
)
def test_growing_figure_is_a_violation(figure: str, step: float) -> None:
    (violation,) = grown(growths(_samples(**{figure: step})))
    assert rules_broken([violation]) == {"growth": 1}
    assert figure.partition("_")[0] in violation.detail


def test_growth_in_the_warm_up_does_not_count() -> None:
    samples = _samples(memory_bytes=0)
    warm = [replace(sample, memory_bytes=100_000_000) if sample.seconds < 200 else sample for sample in samples]
    assert grown(growths(warm)) == []


def test_few_samples_are_not_judged() -> None:
    assert growths(_samples()[:8]) == []
