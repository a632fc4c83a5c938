"""Output of simulations, as tables and as documents."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from router_svc.simulation.figures import Figures, GroupFigures
from router_svc.simulation.metrics import Waits
from router_svc.simulation.scenario import Scenario
from weft_app.cli.output import Column, TextTable

MAX_REASONS = 3
"""Reasons that a table shows; a document has all."""


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
