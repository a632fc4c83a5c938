"""Scenarios with gateways in front of the stub. The stub itself and all contenders take turns."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

from bench import measures
from bench.contender import BACKEND_ROLE, WEFT
from bench.cpu import MB, cpu_seconds, tree_megabytes, used_by_role
from bench.launch import STUB, LaunchError, Target, run_load
from bench.load import Job, Result
from bench.measures import Measure
from bench.report import Figures, Use

UNARY_TOKENS = 16
SETTLE_SECONDS = 2.0
PROMPT = "Explain in one sentence why the sky is blue, and in a second one why the sea is."


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How much of everything."""

    root: Path
    seconds: float = 5.0
    """Length of one run."""
    connections: int = 32
    repetitions: int = 5
    stream_tokens: int = 512
    latency_requests: int = 500
    only: frozenset[str] = frozenset()

    def wants(self, scenario: str) -> bool:
        """Whether this scenario is to run: it is named, or none is."""
        named = self.only & set(SCENARIO_NAMES)
        return not named or scenario in named


SCENARIO_NAMES = ("memory", "unary", "stream", "latency", "placements", "tasks")


def chat(tokens: int, *, stream: bool) -> dict[str, object]:
    """The body of a chat request, without its model."""
    return {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": tokens, "stream": stream}


class Throughput(NamedTuple):
    """A load as high as it gets, and what one unit of it costs: an answer, or an event of a stream."""

    name: str
    tokens: int
    is_stream: bool
    cpu: Measure
    multiple: Measure
    """The same, beside what the stub itself uses for a direct request: machines and their load matter less."""
    rate: Measure


UNARY = Throughput("unary", UNARY_TOKENS, False, measures.UNARY_CPU, measures.UNARY_MULTIPLE, measures.UNARY_RATE)
BURST_SECONDS = 0.4
"""Contenders take turns in short bursts and random order: work of others on the machine then meets all of them."""


def measure_all(options: Options, figures: Figures, stub: Target, targets: Sequence[Target]) -> None:
    """Every scenario that needs the stub. All contenders run all the time, and are measured in turns."""
    if options.wants("memory"):
        _measure_memory(figures, targets, loaded=False)
    if options.wants("latency"):
        _measure_latency(options, figures, stub, targets)
    if options.wants("unary"):
        _measure_throughput(options, figures, UNARY, (stub, *targets))
    if options.wants("stream"):
        stream = Throughput(
            "stream", options.stream_tokens, True, measures.CHUNK_CPU, measures.CHUNK_MULTIPLE, measures.CHUNK_RATE
        )
        _measure_throughput(options, figures, stream, (stub, *targets))
    if options.wants("memory"):
        for target in targets:
            run_load(_job(options, target, UNARY), options.root)
        _measure_memory(figures, targets, loaded=True)


def _measure_throughput(options: Options, figures: Figures, scenario: Throughput, targets: Sequence[Target]) -> None:
    able = []
    for target in targets:
        try:
            run_load(_job(options, target, scenario, seconds=min(1.0, options.seconds)), options.root)
            able.append(target)
        except LaunchError as error:
            figures.skipped.append(f"{target.contender.name}: {scenario.name}: {error}")
    order = Random(0)  # noqa: S311 - an order of turns
    costs: dict[str, float] = {}
    for turn in range(max(1, round(options.repetitions * options.seconds / BURST_SECONDS))):
        costs.clear()
        for target in order.sample(able, len(able)):
            try:
                costs[target.contender.name] = _measure_once(options, figures, scenario, target)
            except LaunchError as error:
                # One that is too slow or broken costs the others nothing.
                able.remove(target)
                figures.skipped.append(f"{target.contender.name}: {scenario.name}, turn {turn + 1}: {error}")
        if direct := costs.pop(STUB.name, 0.0):
            for name, cost in costs.items():
                figures.add(scenario.multiple, name, cost / direct)


def _measure_once(options: Options, figures: Figures, scenario: Throughput, target: Target) -> float:
    """Returns the CPU time of a unit in microseconds: the contender's own, the stub's if it is asked directly."""
    trees = ((target.process, target.contender), (target.stub, STUB))
    before = cpu_seconds(*trees)
    result = run_load(_job(options, target, scenario, seconds=min(BURST_SECONDS, options.seconds)), options.root)
    used = used_by_role(before, cpu_seconds(*trees))
    name, failures = target.contender.name, sum(result.failures.values())
    units = result.events if scenario.is_stream else result.requests
    is_direct = target.contender is STUB
    cost = 1e6 * sum(seconds for role, seconds in used.items() if (role == BACKEND_ROLE) == is_direct) / units
    note = "" if not failures else f"{failures} failed: {next(iter(result.failures))[:80]}"
    if not is_direct:
        figures.add(scenario.cpu, name, cost, note)
    figures.add(scenario.rate, name, units / result.wall_seconds)
    use = Use({**used, "generator": result.cpu_seconds}, result.wall_seconds, units, failures)
    figures.uses.setdefault((scenario.name, name), []).append(use)
    return cost


def _job(options: Options, target: Target, scenario: Throughput, seconds: float | None = None) -> Job:
    return target.job(
        chat(scenario.tokens, stream=scenario.is_stream),
        connections=options.connections,
        seconds=options.seconds if seconds is None else seconds,
        min_events=scenario.tokens if scenario.is_stream else 0,
    )


LATENCIES = {
    False: (
        ("latency_p50", measures.UNARY_P50, measures.ADDED_UNARY_P50),
        ("latency_p99", measures.UNARY_P99, measures.ADDED_UNARY_P99),
    ),
    True: (
        ("first_p50", measures.FIRST_P50, measures.ADDED_FIRST_P50),
        ("first_p99", measures.FIRST_P99, measures.ADDED_FIRST_P99),
    ),
}
"""For whole and streamed answers: fields of a result, and the measures of it and of what a contender adds."""


def _measure_latency(options: Options, figures: Figures, stub: Target, targets: Sequence[Target]) -> None:
    def run(side: Target, body: dict[str, object], requests: int) -> Result:
        return run_load(side.job(body, seconds=options.seconds, max_requests=requests), options.root)

    for is_stream, fields in LATENCIES.items():
        body = chat(UNARY_TOKENS, stream=is_stream)
        for side in (stub, *targets):
            run(side, body, 50)
        for turn in range(options.repetitions):
            for target in _order(targets, turn):
                raw, mesh = (run(side, body, options.latency_requests) for side in (stub, target))
                for field, measure, added in fields:
                    figures.add(measure, stub.contender.name, getattr(raw, field))
                    figures.add(measure, target.contender.name, getattr(mesh, field))
                    figures.add(added, target.contender.name, getattr(mesh, field) - getattr(raw, field))


def _order(targets: Sequence[Target], turn: int) -> Sequence[Target]:
    """Returns the other order in every second turn, so that none is always measured after the same one."""
    return targets if turn % 2 == 0 else targets[::-1]


def _measure_memory(figures: Figures, targets: Sequence[Target], *, loaded: bool) -> None:
    time.sleep(SETTLE_SECONDS)
    for target in targets:
        name = target.contender.name
        if name == WEFT.name:
            main = target.process.memory_info().rss / MB
            figures.add(measures.RSS_LOADED if loaded else measures.RSS_IDLE, name, main)
        if loaded:
            figures.add(measures.TREE_RSS_LOADED, name, tree_megabytes(target.process, target.contender))
