"""Figures as they are taken, one per repetition, until they become rows."""

import statistics
from collections.abc import Mapping, Sequence

from bench.measures import Measure
from bench.report import Row, Share


class Book:
    """Collects samples of every scenario."""

    def __init__(self) -> None:
        self._samples: dict[tuple[Measure, str], list[float]] = {}
        self._notes: dict[tuple[Measure, str], str] = {}
        self._uses: dict[tuple[str, str], list[tuple[Mapping[str, float], float, int]]] = {}
        self._failures: dict[tuple[str, str], int] = {}
        self.skipped: list[str] = []
        """What was not measured, and why."""

    def add(self, measure: Measure, contender: str, value: float, note: str = "") -> None:
        """One repetition's figure."""
        self._samples.setdefault((measure, contender), []).append(value)
        if note:
            self._notes[measure, contender] = note

    def add_use(
        self,
        scenario: str,
        contender: str,
        *,
        cpu_seconds: Mapping[str, float],
        wall_seconds: float,
        units: int,
        failures: int,
    ) -> None:
        """Who used how much CPU in one repetition that made so many requests or chunks."""
        self._uses.setdefault((scenario, contender), []).append((dict(cpu_seconds), wall_seconds, units))
        self._failures[scenario, contender] = self._failures.get((scenario, contender), 0) + failures

    def rows(self, order: Sequence[Measure]) -> list[Row]:
        """Every measure that has figures, in this order."""
        return [
            Row(
                measure=measure,
                contender=contender,
                samples=tuple(samples),
                note=self._notes.get((measure, contender), ""),
            )
            for measure in order
            for (of, contender), samples in self._samples.items()
            if of == measure
        ]

    def shares(self) -> list[Share]:
        """The medians of who used how much."""
        return [
            Share(
                scenario=scenario,
                contender=contender,
                cores=_medians([_divided(used, wall) for used, wall, _ in uses]),
                per_unit_us=_medians([_divided(used, units / 1e6) for used, _, units in uses]),
                failures=self._failures[scenario, contender],
            )
            for (scenario, contender), uses in self._uses.items()
        ]


def _divided(used: Mapping[str, float], divisor: float) -> dict[str, float]:
    return {role: seconds / divisor for role, seconds in used.items()}


def _medians(repetitions: Sequence[Mapping[str, float]]) -> dict[str, float]:
    roles = dict.fromkeys(role for repetition in repetitions for role in repetition)
    return {role: statistics.median(repetition.get(role, 0.0) for repetition in repetitions) for role in roles}
