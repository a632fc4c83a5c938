"""Scenarios with gateways in front of the stub. The stub itself and all contenders take turns."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import measures
from bench.contender import BACKEND_ROLE, WEFT
from bench.cpu import memory_of, snapshot
from bench.launch import STUB, LaunchError, Target, post, run_load
from bench.load import Job, Result
from bench.measures import Measure
from bench.report import Figures

PACED_TOKENS_PER_SECOND = 50
PACED_TOKENS = 100
UNARY_TOKENS = 16
SETTLE_SECONDS = 2.0
PROMPT = "Explain in one sentence why the sky is blue, and in a second one why the sea is."


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How much of everything."""

    root: Path
    """The repository."""
    seconds: float = 5.0
    """Length of one run."""
    connections: int = 32
    repetitions: int = 5
    stream_tokens: int = 512
    latency_requests: int = 500
    real_requests: int = 4
    """Per connection and run."""
    real_tokens: int = 128
    only: frozenset[str] = frozenset()

    def wants(self, scenario: str) -> bool:
        """Whether this scenario is to run: it is named, or none is."""
        named = self.only & set(SCENARIO_NAMES)
        return not named or scenario in named


SCENARIO_NAMES = ("memory", "unary", "stream", "paced", "latency", "real", "placements", "tasks", "start")


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """A load as high as it gets, and what one unit of it costs."""

    name: str
    body: dict[str, object]
    min_events: int
    cpu: Measure
    rate: Measure | None
    counts_events: bool

    def units(self, result: Result) -> int:
        """What the cost is divided by: answers, or the events in them."""
        return result.events if self.counts_events else result.requests


def chat(tokens: int, *, stream: bool) -> dict[str, object]:
    """The body of a chat request, without its model."""
    return {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": tokens, "stream": stream}


def unary() -> Throughput:
    """Whole answers."""
    return Throughput(
        name="unary",
        body=chat(UNARY_TOKENS, stream=False),
        min_events=0,
        cpu=measures.UNARY_CPU,
        rate=measures.UNARY_RATE,
        counts_events=False,
    )


def stream(options: Options) -> Throughput:
    """Long streams at full speed."""
    return Throughput(
        name="stream",
        body=chat(options.stream_tokens, stream=True),
        min_events=options.stream_tokens,
        cpu=measures.CHUNK_CPU,
        rate=measures.CHUNK_RATE,
        counts_events=True,
    )


def paced() -> Throughput:
    """Streams as slow as a real model's, so that nothing arrives together."""
    return Throughput(
        name="paced",
        body=chat(PACED_TOKENS, stream=True),
        min_events=PACED_TOKENS,
        cpu=measures.PACED_CPU,
        rate=None,
        counts_events=True,
    )


def measure_all(options: Options, figures: Figures, stub: Target, targets: Sequence[Target]) -> None:
    """Every scenario that needs the stub. All contenders run all the time, and are measured in turns."""
    if options.wants("memory"):
        _measure_memory(figures, targets, loaded=False)
    if options.wants("latency"):
        _measure_latency(options, figures, stub, targets)
    if options.wants("unary"):
        _measure_throughput(options, figures, unary(), (stub, *targets))
    if options.wants("stream"):
        _measure_throughput(options, figures, stream(options), (stub, *targets))
    if options.wants("paced"):
        with ExitStack() as slowed:
            for target in targets:
                slowed.enter_context(_at_speed(target, PACED_TOKENS_PER_SECOND))
            _measure_throughput(options, figures, paced(), targets)
    if options.wants("memory"):
        for target in targets:
            run_load(_job(options, target, unary()), options.root)
        _measure_memory(figures, targets, loaded=True)


def _measure_throughput(options: Options, figures: Figures, scenario: Throughput, targets: Sequence[Target]) -> None:
    able = []
    for target in targets:
        try:
            run_load(_job(options, target, scenario, seconds=min(1.0, options.seconds)), options.root)
            able.append(target)
        except LaunchError as error:
            figures.skipped.append(f"{target.contender.name}: {scenario.name}: {error}")
    for turn in range(options.repetitions):
        for target in _order(able, turn):
            try:
                _measure_once(options, figures, scenario, target)
            except LaunchError as error:
                # One that is too slow or broken costs the others nothing.
                able.remove(target)
                figures.skipped.append(f"{target.contender.name}: {scenario.name}, turn {turn + 1}: {error}")


def _measure_once(options: Options, figures: Figures, scenario: Throughput, target: Target) -> None:
    trees = ((target.process, target.contender), (target.stub, STUB))
    before = snapshot(*trees)
    result = run_load(_job(options, target, scenario), options.root)
    used = snapshot(*trees).since(before)
    name, units, failures = target.contender.name, scenario.units(result), sum(result.failures.values())
    own = sum(seconds for role, seconds in used.items() if role != BACKEND_ROLE)
    note = "" if not failures else f"{failures} failed: {next(iter(result.failures))[:80]}"
    if target.contender is not STUB:
        figures.add(scenario.cpu, name, 1e6 * own / units, note)
    if scenario.rate is not None:
        figures.add(scenario.rate, name, units / result.wall_seconds)
    figures.add_use(
        scenario.name,
        name,
        cpu_seconds={**used, "generator": result.cpu_seconds},
        wall_seconds=result.wall_seconds,
        units=units,
        failures=failures,
    )


def _job(options: Options, target: Target, scenario: Throughput, seconds: float | None = None) -> Job:
    return target.job(
        scenario.body,
        connections=options.connections,
        seconds=options.seconds if seconds is None else seconds,
        min_events=scenario.min_events,
    )


def _measure_latency(options: Options, figures: Figures, stub: Target, targets: Sequence[Target]) -> None:
    for body, add in (
        (chat(UNARY_TOKENS, stream=False), _add_unary_latency),
        (chat(UNARY_TOKENS, stream=True), _add_first_latency),
    ):
        for side in (stub, *targets):
            run_load(side.job(body, seconds=options.seconds, max_requests=50), options.root)
        for turn in range(options.repetitions):
            for target in _order(targets, turn):
                raw, mesh = (
                    run_load(
                        side.job(body, seconds=options.seconds, max_requests=options.latency_requests), options.root
                    )
                    for side in (stub, target)
                )
                add(figures, stub, target, raw, mesh)


def _order(targets: Sequence[Target], turn: int) -> Sequence[Target]:
    """Returns the other order in every second turn, so that none is always measured after the same one."""
    return targets if turn % 2 == 0 else targets[::-1]


def _add_unary_latency(figures: Figures, stub: Target, target: Target, raw: Result, mesh: Result) -> None:
    for side, result in ((stub, raw), (target, mesh)):
        figures.add(measures.UNARY_P50, side.contender.name, result.latency_p50)
        figures.add(measures.UNARY_P99, side.contender.name, result.latency_p99)
    figures.add(measures.ADDED_UNARY_P50, target.contender.name, mesh.latency_p50 - raw.latency_p50)
    figures.add(measures.ADDED_UNARY_P99, target.contender.name, mesh.latency_p99 - raw.latency_p99)


def _add_first_latency(figures: Figures, stub: Target, target: Target, raw: Result, mesh: Result) -> None:
    for side, result in ((stub, raw), (target, mesh)):
        figures.add(measures.FIRST_P50, side.contender.name, result.first_p50)
        figures.add(measures.FIRST_P99, side.contender.name, result.first_p99)
    figures.add(measures.ADDED_FIRST_P50, target.contender.name, mesh.first_p50 - raw.first_p50)
    figures.add(measures.ADDED_FIRST_P99, target.contender.name, mesh.first_p99 - raw.first_p99)


def _measure_memory(figures: Figures, targets: Sequence[Target], *, loaded: bool) -> None:
    time.sleep(SETTLE_SECONDS)
    for target in targets:
        name = target.contender.name
        if name == WEFT.name:
            main = memory_of(target.process, target.contender, only_main=True)
            figures.add(measures.RSS_LOADED if loaded else measures.RSS_IDLE, name, main.rss)
            figures.add(measures.PSS_LOADED if loaded else measures.PSS_IDLE, name, main.pss)
            figures.add(measures.USS_LOADED if loaded else measures.USS_IDLE, name, main.uss)
        if loaded:
            tree = memory_of(target.process, target.contender, only_main=False)
            figures.add(measures.TREE_RSS_LOADED, name, tree.rss)
            figures.add(measures.TREE_PSS_LOADED, name, tree.pss)


@contextmanager
def _at_speed(target: Target, tokens_per_second: float) -> Iterator[None]:
    post(target.stub_port, "/fake/behaviour", {"tokens_per_second": tokens_per_second})
    try:
        yield
    finally:
        post(target.stub_port, "/fake/behaviour", {"tokens_per_second": 0.0})
