"""`weft mesh simulate`: runs the scheduler on a scenario file in virtual time, and prints the figures."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import StrEnum
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from router_svc.policy.pool_settings import ChoicePolicy
from router_svc.policy.port import SchedulerPort
from router_svc.policy.scheduler import Scheduler
from weft.documents.codec import camel
from weft_app.cli.options import EXIT_INTERRUPTED, OutputFormat, OutputOption
from weft_app.cli.output import Column, TextTable, custom_columns, print_document
from weft_app.cli.terminal import is_err_terminal, note, rewrite, say
from weft_extensions.simulate.engine import Simulation
from weft_extensions.simulate.fifo_baseline import FifoScheduler
from weft_extensions.simulate.figures import Figures, GroupFigures, HostFigures, figures_of
from weft_extensions.simulate.invariants import InvariantChecker
from weft_extensions.simulate.metrics import Waits
from weft_extensions.simulate.scenario import Scenario
from weft_extensions.simulate.scenario_file import MAX_REQUESTS, load_scenario

OURS = "weft"
PROGRESS_SECONDS = 1.0
MAX_REASONS = 3
"""Maximum number of reasons in a table; a document has all."""


class Rival(StrEnum):
    """What the router is compared with."""

    FIFO = "fifo"
    FIRST_TOKEN = ChoicePolicy.FIRST_TOKEN.value
    LEAST_LOADED = ChoicePolicy.LEAST_LOADED.value
    ROUND_ROBIN = ChoicePolicy.ROUND_ROBIN.value
    RANDOM = ChoicePolicy.RANDOM.value


def _scheduler(scenario: Scenario, name: str) -> SchedulerPort:
    if name == Rival.FIFO:
        return FifoScheduler(scenario)
    settings = scenario.settings
    if name != OURS:
        policy = ChoicePolicy(name)
        settings = replace(
            settings, pools={pool: replace(each, policy=policy) for pool, each in settings.pools.items()}
        )
    return Scheduler(scenario.limits, settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    figures: Figures
    stories: Mapping[int, list[tuple[float, str]]]
    wall_seconds: float
    was_interrupted: bool


def simulate(  # noqa: PLR0917 - options are parameters in typer
    path: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A scenario file; examples/scenarios has some.")],
    seed: Annotated[int | None, typer.Option(min=0, help="Seed instead of the file's.")] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, max=MAX_REQUESTS, help="Maximum number of requests, instead of the file's.")
    ] = None,
    load: Annotated[float, typer.Option(min=0.001, max=1000.0, help="Factor for the request rates.")] = 1.0,
    against: Annotated[
        list[Rival] | None,
        typer.Option(
            metavar="SCHEDULER",
            help="Also run this one and compare (repeatable): fifo, or the router with a policy: first_token, "
            "least_loaded, round_robin, random.",
        ),
    ] = None,
    explain: Annotated[
        list[int] | None,
        typer.Option(min=1, metavar="REQUEST", help="Print every decision about the n-th request (repeatable)."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Check every decision against the invariants; slow.")] = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Simulate a mesh: waits, throughput, refusals and the cost of model swaps.

    Example: weft mesh simulate examples/scenarios/three-tenants.yaml --against fifo
    """
    scenario = load_scenario(path).at_load(load)
    scenario = replace(
        scenario,
        seed=scenario.seed if seed is None else seed,
        max_requests=scenario.max_requests if requests is None else requests,
    )
    runs: dict[str, _Run] = {}
    for name in [OURS, *(against or ())]:
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
    scheduler = _scheduler(scenario, name)
    simulation = Simulation(scenario, scheduler, checker=checker, explained=explained)
    was_interrupted = False
    try:
        simulation.run(_progress(simulation, name))
    except KeyboardInterrupt:
        was_interrupted = True
    if is_err_terminal():
        rewrite("")
    figures = figures_of(simulation)
    return _Run(
        # After an interrupt between the last event and its consequences, the run looks complete.
        figures=replace(figures, is_complete=figures.is_complete and not was_interrupted),
        stories=simulation.decision_log.lines,
        wall_seconds=time.monotonic() - begun_at,
        was_interrupted=was_interrupted,
    )


def _progress(simulation: Simulation, name: str) -> Callable[[], None]:
    """Returns a function that updates a progress line on a terminal, at most once per second."""
    shown_at = time.monotonic()

    def show() -> None:
        nonlocal shown_at
        if time.monotonic() >= shown_at + PROGRESS_SECONDS and is_err_terminal():
            shown_at = time.monotonic()
            done, seconds = simulation.arrived, simulation.events.now
            rewrite(f"{name}: {done:,} requests, {seconds:,.0f} s simulated")

    return show


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
    columns += [Column(name.upper(), itemgetter(number)) for number, name in enumerate(runs, start=1)]
    rows = [[title, *cells] for title, cells in _totals(list(runs.values()))]
    return "\n".join([head, TextTable(columns, is_cut=False).plain_text(rows), _groups_text(runs)])


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
        "schedulers": {name: _document(figures) for name, figures in runs.items()},
        "explained": {
            str(key): [{"atSeconds": round(at, 6), "event": text} for at, text in lines]
            for key, lines in stories.items()
        },
    }


def _totals(runs: Sequence[Figures]) -> Iterator[tuple[str, list[str]]]:
    yield "served", [f"{run.total.served:,} of {run.total.requests:,}" for run in runs]
    yield "tokens/s in time", [f"{run.total.good_tokens_per_second:,.1f}" for run in runs]
    yield "wait p50, p95, p99, longest", [_waits_text(run.total.waits) for run in runs]
    yield "first token p50, p95, p99, longest", [_waits_text(run.total.first_tokens) for run in runs]
    shares = [run.total.cached_share for run in runs]
    yield "prompt tokens cached", ["-" if share is None else f"{share:.1%}" for share in shares]
    yield "until refused p50, p95, p99, longest", [_waits_text(run.total.refusal_waits) for run in runs]
    yield "first estimate off by p50, p95, ...", [_waits_text(run.estimate_errors) for run in runs]
    kept = [run.quotes_kept for run in runs]
    yield (
        "answers within the quoted p90",
        [", ".join(f"{name.replace('_', ' ')} {share:.1%}" for name, share in each.items()) or "-" for each in kept],
    )
    yield "loads, of them swaps", [f"{run.loads:,}, {run.swaps:,}" for run in runs]
    yield "swaps per 1,000 served", [f"{run.swaps_per_1000:.1f}" for run in runs]
    longest = [None if run.cold_waits is None else run.cold_waits.longest for run in runs]
    bounds = zip(longest, (run.cold_wait_bound_seconds for run in runs), strict=True)
    yield "wait for a load, longest (bound)", [f"{_seconds(most)} ({_seconds(bound)})" for most, bound in bounds]
    yield "attempts per request (where it fails)", [_attempts_text(run) for run in runs]
    yield "fairness (Jain)", [f"{run.fairness:.3f}" for run in runs]
    yield (
        "hosts busy, loading, idle, down",
        [f"{run.hosts.busy:.0%}, {run.hosts.loading:.0%}, {run.hosts.idle:.0%}, {run.hosts.down:.0%}" for run in runs],
    )


def _groups_text(runs: Mapping[str, Figures]) -> str:
    columns = custom_columns(
        f"WHO_OR_WHAT:subject {'SCHEDULER:scheduler' if len(runs) > 1 else ''} REQUESTS:group.requests:{{:,}} "
        "SERVED:group.served:{:,} P50 P95 P99 LONGEST TOKENS/S:group.good_tokens_per_second:{:,.1f} "
        "SHARE:group.served_share:{:.2f} NOT_SERVED",
        P50=lambda row: _seconds(row["group"].waits and row["group"].waits.p50),
        P95=lambda row: _seconds(row["group"].waits and row["group"].waits.p95),
        P99=lambda row: _seconds(row["group"].waits and row["group"].waits.p99),
        LONGEST=lambda row: _seconds(row["group"].waits and row["group"].waits.longest),
        NOT_SERVED=lambda row: _reasons_text(row["group"]),
    )
    return TextTable(columns, is_cut=False).plain_text(_group_rows(runs))


def _group_rows(runs: Mapping[str, Figures]) -> Iterator[dict[str, Any]]:
    for kind in ("tenant", "target", "band"):
        by_run = {name: {each.name: each for each in getattr(figures, f"{kind}s")} for name, figures in runs.items()}
        for group in next(iter(by_run.values())):
            for name, groups in by_run.items():
                if group in groups:
                    yield {"subject": f"{kind} {group}", "scheduler": name, "group": groups[group]}


def _waits_text(waits: Waits | None) -> str:
    if waits is None:
        return "-"
    return ", ".join(_seconds(each) for each in (waits.p50, waits.p95, waits.p99, waits.longest))


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


_KEYS = {
    "waits": "waitSeconds",
    "refusal_waits": "refusalWaitSeconds",
    "first_tokens": "firstTokenSeconds",
    "refused": "notServed",
    "cold_waits": "coldWaitSeconds",
    "estimate_errors": "estimateErrorSeconds",
}
"""Keys of figures that differ from their fields."""
_DIGITS = {"goodTokensPerSecond": 3, "coldWaitBoundSeconds": 17}
"""Decimal places of figures, by default six."""


def _document(value: Any, digits: int = 6) -> Any:
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, tuple):
        return [_document(each) for each in value]
    if isinstance(value, Mapping):
        return dict(value)
    if not is_dataclass(value):
        return value
    found = {}
    for each in fields(value):
        inner, key = getattr(value, each.name), _KEYS.get(each.name) or camel(each.name)
        if key == "quotesKept":
            inner = {camel(name): share for name, share in inner.items()}
        if isinstance(value, HostFigures) and key == "hosts":
            key = "count"
        if inner is not None or key != "servedShare":
            found[key] = _document(inner, _DIGITS.get(key, 6))
        if isinstance(value, Figures) and key == "swaps":
            found["swapsPer1000"] = round(value.swaps_per_1000, 3)
    return found
