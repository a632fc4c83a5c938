"""`weft simulate`: runs the scheduler on a scenario file in virtual time."""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer

from router_svc.policy.scheduler import Scheduler
from router_svc.simulation.engine import RunOptions, Simulation
from router_svc.simulation.fifo_baseline import FifoScheduler
from router_svc.simulation.figures import Figures, figures_of
from router_svc.simulation.invariants import InvariantChecker
from router_svc.simulation.scenario import Scenario
from router_svc.simulation.scheduler_port import SchedulerPort
from weft_app.cli.options import EXIT_INTERRUPTED, OutputFormat, OutputOption, note, reporting
from weft_app.cli.output import print_document, say
from weft_app.cli.simulation_output import document_of, story_text, summary_text
from weft_app.compose.simulate import MAX_REQUESTS, load_scenario

OURS = "weft"
PROGRESS_SECONDS = 1.0
_SCHEDULERS: Mapping[str, Callable[[Scenario], SchedulerPort]] = MappingProxyType(
    {
        OURS: lambda scenario: Scheduler(scenario.limits, scenario.settings),
        "fifo": lambda scenario: FifoScheduler(scenario.limits),
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
    with reporting():
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
    simulation = Simulation(scenario, _SCHEDULERS[name](scenario), RunOptions(checker=checker, explained=explained))
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
