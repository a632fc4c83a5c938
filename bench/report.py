"""The samples of a run and its report: medians with their spread, goals with verdicts, as Markdown."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.contender import WEFT
from bench.machine import Machine
from bench.measures import Measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measure of one contender, a value per repetition."""

    measure: Measure
    contender: str
    samples: tuple[float, ...]
    note: str = ""

    @property
    def value(self) -> float:
        """The median."""
        return statistics.median(self.samples)

    @property
    def verdict(self) -> str:
        """Goals are weft's alone."""
        return self.measure.verdict(self.value) if self.contender == WEFT.name else "-"


class Use(NamedTuple):
    """Who used how much CPU in one repetition."""

    cpu_seconds: Mapping[str, float]
    """By role; "generator" is the load generator."""
    wall_seconds: float
    units: int
    """Requests or chunks, whatever the scenario counts."""
    failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole run."""

    machine: Machine
    settings: dict[str, str]
    packages: dict[str, str]
    """What each contender that has an environment of its own was installed from."""
    rows: Sequence[Row]
    uses: Mapping[tuple[str, str], Sequence[Use]]
    """By scenario and contender, so that saturation is visible."""
    skipped: Sequence[str] = ()


def markdown(report: Report) -> str:
    """The report as Markdown."""
    machine = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    settings = ", ".join(f"{name} {value}" for name, value in report.settings.items())
    peers = ", ".join(f"{name} from {packages}" for name, packages in report.packages.items())
    parts = [
        f"# Bench of {machine.date[:10]}\n",
        f"- commit: {machine.commit}",
        f"- machine: {machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB; {machine.kernel}",
        f"- load average before the run: {machine.load_average}",
        f"- {machine.python}; {versions}",
        f"- measured at {machine.date}: {settings}",
        f"- peers: {peers or 'none'}",
        "- value: median over the repetitions; spread: smallest to largest. What rows mean: bench/README.md\n",
        "## weft and its goals\n",
        goal_table(row for row in report.rows if row.contender == WEFT.name),
        "\n## Beside each other\n",
        comparison_table(report.rows),
        "\n## In turns\n",
        turn_table(report.rows),
        "\n## Where the CPU time went\n",
        share_table(report.uses),
    ]
    if report.skipped:
        parts += ["\n## Not measured\n", *(f"- {line}" for line in report.skipped)]
    return "\n".join(parts) + "\n"


def goal_table(rows: Iterable[Row]) -> str:
    """One line per row, with goal and verdict."""
    lines = [
        (
            row.measure.title,
            f"{number(row.value, row.measure)} {row.measure.unit}".rstrip(),
            f"{number(min(row.samples), row.measure)} to {number(max(row.samples), row.measure)} ({len(row.samples)})",
            row.measure.goal_text,
            row.verdict,
            row.note,
        )
        for row in rows
    ]
    return table(("measure", "value", "spread (runs)", "goal", "verdict", "note"), lines)


def comparison_table(rows: Sequence[Row]) -> str:
    """One line per measure that anybody but weft has, one column per contender."""
    names = list(dict.fromkeys(row.contender for row in rows))
    found = {(row.measure, row.contender): row for row in rows}
    shared = dict.fromkeys(row.measure for row in rows if row.contender != WEFT.name)
    lines = [
        (
            f"{measure.title} ({measure.unit})" if measure.unit else measure.title,
            *(number(found[measure, name].value, measure) if (measure, name) in found else "-" for name in names),
        )
        for measure in shared
    ]
    return table(("measure", *names), lines)


def turn_table(rows: Sequence[Row]) -> str:
    """One line per measure and contender beside weft: weft's value over the contender's, turn by turn.

    A turn lasts seconds, so a machine whose speed drifts over minutes disturbs these ratios less than the medians.
    """
    found = {(row.measure, row.contender): row for row in rows}
    pairs = [(found[row.measure, WEFT.name], row) for row in rows if (row.measure, WEFT.name) in found]
    lines = []
    for ours, row in pairs:
        ratios = sorted(a / b for a, b in zip(ours.samples, row.samples, strict=False) if b)
        if row.contender != WEFT.name and len(ratios) > 1:
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            lines.append(
                (row.measure.title, row.contender, f"{middle:.3f}", f"{low:.3f} to {high:.3f} ({len(ratios)})")
            )
    return table(("measure", "beside", "weft's value over the other's, median", "middle half (turns)"), lines)


def share_table(uses: Mapping[tuple[str, str], Sequence[Use]]) -> str:
    """One line per scenario and contender: cores in use, and CPU per request or chunk, by role; medians."""
    lines = []
    for (scenario, contender), runs in uses.items():
        cores, costs = list[str](), list[str]()
        for role in sorted({role for run in runs for role in run.cpu_seconds}):
            cpu = [run.cpu_seconds.get(role, 0.0) for run in runs]
            in_use = statistics.median(each / run.wall_seconds for each, run in zip(cpu, runs, strict=True))
            cost = statistics.median(1e6 * each / run.units for each, run in zip(cpu, runs, strict=True))
            cores.append(f"{role} {in_use:.2f}")
            costs.append(f"{role} {cost:,.1f}")
        failures = str(sum(run.failures for run in runs))
        lines.append((scenario, contender, ", ".join(cores), ", ".join(costs), failures))
    return table(("scenario", "contender", "cores in use", "CPU us per request or chunk", "failed requests"), lines)


def number(value: float, measure: Measure) -> str:
    """A value with the digits of its measure."""
    return f"{value:,.{measure.digits}f}"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    rows = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in line] for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


class Figures:
    """The figures of a run: samples of every scenario, one per repetition, until they become rows."""

    def __init__(self) -> None:
        self._samples: dict[tuple[Measure, str], list[float]] = {}
        self._notes: dict[tuple[Measure, str], str] = {}
        self.uses: dict[tuple[str, str], list[Use]] = {}
        """By scenario and contender."""
        self.skipped: list[str] = []
        """What was not measured, and why."""

    def add(self, measure: Measure, contender: str, value: float, note: str = "") -> None:
        """One repetition's figure."""
        self._samples.setdefault((measure, contender), []).append(value)
        if note:
            self._notes[measure, contender] = note

    @property
    def measures(self) -> list[Measure]:
        """Those with figures, in the order of their first ones."""
        return list(dict.fromkeys(measure for measure, _ in self._samples))

    def rows(self, order: Sequence[Measure]) -> list[Row]:
        """Return every measure that has figures, in this order."""
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
