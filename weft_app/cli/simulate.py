"""`weft simulate`: runs the scheduler on a scenario file in virtual time, and prints the figures."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from router_svc.policy.port import SchedulerPort
from router_svc.policy.scheduler import Scheduler
from router_svc.simulation.engine import Simulation
from router_svc.simulation.fifo_baseline import FifoScheduler
from router_svc.simulation.figures import Figures, GroupFigures, figures_of
from router_svc.simulation.invariants import InvariantChecker
from router_svc.simulation.metrics import Waits
from router_svc.simulation.scenario import Scenario
from weft_app.cli.options import EXIT_INTERRUPTED, OutputFormat, OutputOption, note
from weft_app.cli.output import Column, TextTable, print_document, say
from weft_app.config.scenario import MAX_REQUESTS, load_scenario

OURS = "weft"
PROGRESS_SECONDS = 1.0
MAX_REASONS = 3
"""Reasons that a table shows; a document has all."""
_SCHEDULERS: Mapping[str, Callable[[Scenario], SchedulerPort]] = MappingProxyType(
    {
        OURS: lambda scenario: Scheduler(scenario.limits, scenario.settings),
        "fifo": FifoScheduler,
    }
)


class Against(StrEnum):
    """A scheduler to compare with."""

    FIFO = "fifo"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The result of one scheduler."""

    figures: Figures
    stories: Mapping[int, list[tuple[float, str]]]
    wall_seconds: float
    was_interrupted: bool


def simulate(  # noqa: PLR0917 - options are parameters in typer
    path: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A scenario file; examples/scenarios has some.")],
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Seed instead of the file's.")] = None,
    requests: Annotated[
        int | None,
        typer.Option("--requests", min=1, max=MAX_REQUESTS, help="Maximum number of requests, instead of the file's."),
    ] = None,
    load: Annotated[float, typer.Option("--load", min=0.001, max=1000.0, help="Factor of the request rates.")] = 1.0,
    against: Annotated[Against | None, typer.Option("--against", help="Also run this scheduler and compare.")] = None,
    explain: Annotated[
        list[int] | None,
        typer.Option(
            "--explain", min=1, metavar="REQUEST", help="Print every decision about the n-th request (repeatable)."
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Check every decision against the invariants; slow.")] = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Simulate a mesh: waits, throughput, refusals and the cost of model swaps.

    Example: weft simulate examples/scenarios/three-tenants.yaml --against fifo
    """
    scenario = load_scenario(path).at_load(load)
    scenario = replace(
        scenario,
        seed=scenario.seed if seed is None else seed,
        max_requests=scenario.max_requests if requests is None else requests,
    )
    runs: dict[str, _Run] = {}
    for name in [OURS, *([against.value] if against is not None else [])]:
        runs[name] = _run(scenario, name, tuple(explain or ()), check=check and name == OURS)
        if runs[name].was_interrupted:
            note("interrupted; these are the figures until then")
            break
    _print(scenario, runs, output)
    if any(run.was_interrupted for run in runs.values()):
        raise typer.Exit(EXIT_INTERRUPTED)


def _run(scenario: Scenario, name: str, explained: tuple[int, ...], *, check: bool) -> _Run:
    begun_at = time.monotonic()
    checker = InvariantChecker(scenario) if check else None
    simulation = Simulation(scenario, _SCHEDULERS[name](scenario), checker=checker, explained=explained)
    was_interrupted = False
    progress = _Progress(simulation, name)
    try:
        simulation.run(progress.show)
    except KeyboardInterrupt:
        was_interrupted = True
    progress.clear()
    figures = figures_of(simulation)
    return _Run(
        # An interrupt between the last event and its consequences looks like a complete run.
        figures=replace(figures, is_complete=figures.is_complete and not was_interrupted),
        stories=simulation.decision_log.lines,
        wall_seconds=time.monotonic() - begun_at,
        was_interrupted=was_interrupted,
    )


class _Progress:
    """A progress line on a terminal, updated about once per second."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self._simulation = simulation
        self._name = name
        self._shown_at = time.monotonic()
        self._is_shown = False

    def show(self) -> None:
        """Updates the line, at most once per second."""
        now = time.monotonic()
        if now < self._shown_at + PROGRESS_SECONDS or not sys.stderr.isatty():
            return
        self._shown_at, self._is_shown = now, True
        simulation = self._simulation
        done, seconds = simulation.arrived, simulation.events.now
        sys.stderr.write(f"\r\x1b[K{self._name}: {done:,} requests, {seconds:,.0f} s simulated")
        sys.stderr.flush()

    def clear(self) -> None:
        """Removes the line."""
        if self._is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _print(scenario: Scenario, runs: Mapping[str, _Run], output: OutputFormat) -> None:
    figures = {name: run.figures for name, run in runs.items()}
    if output is OutputFormat.TABLE:
        say(summary_text(scenario, figures))
        for key, lines in runs[OURS].stories.items():
            say(f"\n{story_text(key, lines)}")
        took = ", ".join(f"{name} {run.wall_seconds:.1f} s" for name, run in runs.items())
        note(f"simulated in {took}")
    else:
        print_document(document_of(scenario, figures, runs[OURS].stories), output)


def summary_text(scenario: Scenario, runs: Mapping[str, Figures]) -> str:
    """Returns all figures as text; `runs` by scheduler."""
    figures = next(iter(runs.values()))
    hosts = figures.hosts.hosts
    head = f"{scenario.name}, seed {scenario.seed}: {figures.total.requests:,} requests in "
    head += f"{figures.simulated_seconds:,.0f} s on {hosts:,} host{'' if hosts == 1 else 's'}\n"
    columns = [Column("", lambda row: row[0])]
    columns += [Column(name.upper(), _cell(number)) for number, name in enumerate(runs, start=1)]
    rows = [[title, *cells] for title, cells in _totals(list(runs.values()))]
    return "\n".join([head, TextTable(columns).plain_text(rows), _groups_text(runs)])


def story_text(key: int, lines: Sequence[tuple[float, str]]) -> str:
    """Returns the decisions about one request as text."""
    entries = "".join(f"{at:12.3f} s  {text}\n" for at, text in lines)
    return f"request {key}\n" + (entries or "  there was no such request\n")


def document_of(
    scenario: Scenario, runs: Mapping[str, Figures], stories: Mapping[int, Sequence[tuple[float, str]]]
) -> dict[str, Any]:
    """Returns all figures as a document."""
    return {
        "kind": "Simulation",
        "name": scenario.name,
        "seed": scenario.seed,
        "schedulers": {name: _figures_document(figures) for name, figures in runs.items()},
        "explained": {
            str(key): [{"atSeconds": round(at, 6), "event": text} for at, text in lines]
            for key, lines in stories.items()
        },
    }


def _cell(number: int) -> Any:
    return lambda row: row[number]


def _totals(runs: Sequence[Figures]) -> Iterator[tuple[str, list[str]]]:
    yield "served", [f"{run.total.served:,} of {run.total.requests:,}" for run in runs]
    yield "tokens/s in time", [f"{run.total.good_tokens_per_second:,.1f}" for run in runs]
    yield "wait p50, p95, p99, longest", [_waits_text(run.total.waits) for run in runs]
    yield "until refused p50, p95, p99, longest", [_waits_text(run.total.refusal_waits) for run in runs]
    yield "first estimate off by p50, p95, ...", [_waits_text(run.estimate_errors) for run in runs]
    yield "loads, of them swaps", [f"{run.loads:,}, {run.swaps:,}" for run in runs]
    yield "swaps per 1,000 served", [f"{run.swaps_per_1000:.1f}" for run in runs]
    yield "wait for a load, longest (bound)", [_cold_waits_text(run) for run in runs]
    yield "attempts per request (where it fails)", [_attempts_text(run) for run in runs]
    yield "fairness (Jain)", [f"{run.fairness:.3f}" for run in runs]
    yield (
        "hosts busy, loading, idle, down",
        [f"{run.hosts.busy:.0%}, {run.hosts.loading:.0%}, {run.hosts.idle:.0%}, {run.hosts.down:.0%}" for run in runs],
    )


def _groups_text(runs: Mapping[str, Figures]) -> str:
    shown_by = [Column("SCHEDULER", lambda row: row[1])] if len(runs) > 1 else []
    columns = [
        Column("WHO OR WHAT", lambda row: row[0]),
        *shown_by,
        Column("REQUESTS", lambda row: f"{row[2].requests:,}"),
        Column("SERVED", lambda row: f"{row[2].served:,}"),
        Column("P50", lambda row: _seconds(row[2].waits and row[2].waits.p50)),
        Column("P95", lambda row: _seconds(row[2].waits and row[2].waits.p95)),
        Column("P99", lambda row: _seconds(row[2].waits and row[2].waits.p99)),
        Column("LONGEST", lambda row: _seconds(row[2].waits and row[2].waits.longest)),
        Column("TOKENS/S", lambda row: f"{row[2].good_tokens_per_second:,.1f}"),
        Column("SHARE", lambda row: "" if row[2].served_share is None else f"{row[2].served_share:.2f}"),
        Column("NOT SERVED", lambda row: _reasons_text(row[2])),
    ]
    return TextTable(columns).plain_text(_group_rows(runs))


def _group_rows(runs: Mapping[str, Figures]) -> Iterator[tuple[str, str, GroupFigures]]:
    for kind in ("tenant", "target", "band"):
        by_run = {name: {each.name: each for each in getattr(figures, f"{kind}s")} for name, figures in runs.items()}
        for group in next(iter(by_run.values())):
            for name, groups in by_run.items():
                if group in groups:
                    yield f"{kind} {group}", name, groups[group]


def _waits_text(waits: Waits | None) -> str:
    if waits is None:
        return "-"
    return ", ".join(_seconds(each) for each in (waits.p50, waits.p95, waits.p99, waits.longest))


def _cold_waits_text(run: Figures) -> str:
    longest = "-" if run.cold_waits is None else _seconds(run.cold_waits.longest)
    return f"{longest} ({_seconds(run.cold_wait_bound_seconds)})"


def _attempts_text(run: Figures) -> str:
    failing = run.attempts_per_request_in_outage
    return f"{run.attempts_per_request:.3f} ({'-' if failing is None else f'{failing:.3f}'})"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def _reasons_text(group: GroupFigures) -> str:
    reasons = list(group.refused.items())
    shown = [f"{count:,} {reason}" for reason, count in reasons[:MAX_REASONS]]
    return ", ".join([*shown, "..."] if len(reasons) > MAX_REASONS else shown)


def _figures_document(figures: Figures) -> dict[str, Any]:
    return {
        "simulatedSeconds": round(figures.simulated_seconds, 6),
        "isComplete": figures.is_complete,
        "total": _group_document(figures.total),
        "tenants": [_group_document(group) for group in figures.tenants],
        "targets": [_group_document(group) for group in figures.targets],
        "bands": [_group_document(group) for group in figures.bands],
        "loads": figures.loads,
        "swaps": figures.swaps,
        "swapsPer1000": round(figures.swaps_per_1000, 3),
        "coldWaitSeconds": _waits_document(figures.cold_waits),
        "coldWaitBoundSeconds": figures.cold_wait_bound_seconds,
        "estimateErrorSeconds": _waits_document(figures.estimate_errors),
        "estimateErrorShares": _waits_document(figures.estimate_error_shares),
        "attempts": figures.attempts,
        "attemptsPerRequest": round(figures.attempts_per_request, 6),
        "attemptsPerRequestInOutage": (
            None if figures.attempts_per_request_in_outage is None else round(figures.attempts_per_request_in_outage, 6)
        ),
        "fairness": round(figures.fairness, 6),
        "hosts": {
            "count": figures.hosts.hosts,
            "busy": round(figures.hosts.busy, 6),
            "loading": round(figures.hosts.loading, 6),
            "idle": round(figures.hosts.idle, 6),
            "down": round(figures.hosts.down, 6),
        },
    }


def _group_document(group: GroupFigures) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": group.name,
        "requests": group.requests,
        "served": group.served,
        "notServed": dict(group.refused),
        "waitSeconds": _waits_document(group.waits),
        "refusalWaitSeconds": _waits_document(group.refusal_waits),
        "goodTokensPerSecond": round(group.good_tokens_per_second, 3),
    }
    return document if group.served_share is None else document | {"servedShare": round(group.served_share, 6)}


def _waits_document(waits: Waits | None) -> dict[str, float] | None:
    if waits is None:
        return None
    return {
        "p50": round(waits.p50, 6),
        "p95": round(waits.p95, 6),
        "p99": round(waits.p99, 6),
        "longest": round(waits.longest, 6),
    }
