"""What is measured: names, units and goals, in the order of the table."""

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """How a figure stands to its goal."""

    MET = "met"
    MISSED = "missed"
    NONE = "-"
    """There is no goal, or the row is not weft's."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A limit and on which side of it to be."""

    limit: float
    at_most: bool = True

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.limit:,g}"

    def verdict(self, value: float) -> Verdict:
        """Whether `value` meets it; reaching the limit does."""
        return Verdict.MET if (value <= self.limit if self.at_most else value >= self.limit) else Verdict.MISSED


@dataclass(frozen=True, slots=True)
class Measure:
    """One row of the table."""

    title: str
    unit: str
    goal: Goal | None = None
    digits: int = 1


def _streams(count: int) -> str:
    return f"{count} stream{'s' * (count > 1)}"


HELP_WALL = Measure("start: weft --help", "s", Goal(0.3), 2)
HELP_CPU = Measure("start: CPU of weft --help", "s", None, 2)
UP_WALL = Measure("start: weft up until its services listen", "s", Goal(1.5), 2)
UP_CPU = Measure("start: CPU of weft up's host until its services listen", "s", None, 2)
HOST_MEMORY = Measure("start: memory of weft up's host, idle", "MB", Goal(130), 0)
UNARY_CPU = Measure("CPU per unary chat request (16 tokens)", "us", None, 0)
UNARY_RATE = Measure("unary chat requests", "1/s", None, 0)
CHUNK_CPU = Measure("CPU per streamed chunk, saturated", "us", Goal(10))
CHUNK_RATE = Measure("streamed chunks, saturated", "1/s", None, 0)
PACED_CPU = Measure("CPU per streamed chunk, 50 tokens/s per stream", "us")
UNARY_P50 = Measure("unary latency p50, 1 connection", "ms", None, 2)
UNARY_P99 = Measure("unary latency p99, 1 connection", "ms", None, 2)
ADDED_UNARY_P50 = Measure("added unary latency p50, 1 connection", "ms", Goal(3), 2)
ADDED_UNARY_P99 = Measure("added unary latency p99, 1 connection", "ms", None, 2)
FIRST_P50 = Measure("time to first chunk p50, 1 connection", "ms", None, 2)
FIRST_P99 = Measure("time to first chunk p99, 1 connection", "ms", None, 2)
ADDED_FIRST_P50 = Measure("added time to first chunk p50, 1 connection", "ms", Goal(3), 2)
ADDED_FIRST_P99 = Measure("added time to first chunk p99, 1 connection", "ms", None, 2)
REAL_RATIO_ONE = Measure(
    "real model: tokens/s through the mesh / asked directly, 1 connection", "", Goal(0.97, False), 3
)
REAL_RATIO_MANY = Measure(
    "real model: tokens/s through the mesh / asked directly, 4 connections", "", Goal(0.97, False), 3
)
REAL_TOKENS_ONE = Measure("real model: tokens/s, 1 connection", "1/s")
REAL_TOKENS_MANY = Measure("real model: tokens/s, 4 connections", "1/s")
ENGINES = ("llama_server", "vllm", "ctranslate2", "openai_http")
"""Engines that are asked through the mesh and directly."""
ENGINE_STREAMS = (1, 4, 16)
ENGINE_RATIO = {
    (engine, streams): Measure(
        f"{engine}: tokens/s through the mesh / asked directly, {_streams(streams)}", "", Goal(0.97, False), 3
    )
    for engine in ENGINES
    for streams in ENGINE_STREAMS
}
ENGINE_TOKENS = {
    (engine, streams): Measure(f"{engine}: tokens/s, {_streams(streams)}", "1/s")
    for engine in ENGINES
    for streams in ENGINE_STREAMS
}
ENGINE_FIRST = {engine: Measure(f"{engine}: time to first token p50, 1 stream", "ms", None, 2) for engine in ENGINES}
ENGINE_ADDED_FIRST = {
    engine: Measure(f"{engine}: added time to first token p50, 1 stream", "ms", Goal(5), 2) for engine in ENGINES
}
RSS_IDLE = Measure("memory of the host process after start, RSS", "MB", Goal(130))
PSS_IDLE = Measure("memory of the host process after start, PSS", "MB")
USS_IDLE = Measure("memory of the host process after start, USS", "MB")
RSS_LOADED = Measure("memory of the host process after load, RSS", "MB", Goal(130))
PSS_LOADED = Measure("memory of the host process after load, PSS", "MB")
USS_LOADED = Measure("memory of the host process after load, USS", "MB")
TREE_RSS_LOADED = Measure("memory of all its processes but backends after load, RSS", "MB")
TREE_PSS_LOADED = Measure("memory of all its processes but backends after load, PSS", "MB")
COLD_START = Measure("`weft up` to the first streamed token, cold home", "s", Goal(15), 2)
REGISTRY_CPU = Measure("registry: one core's share with 10,000 sessions", "%", Goal(30))
REGISTRY_RSS = Measure("registry: memory with 10,000 sessions, RSS", "MB", Goal(400))
NEWS_P50 = Measure("registry: a change reaches 50 watchers, p50", "ms")
NEWS_P99 = Measure("registry: a change reaches 50 watchers, p99", "ms", Goal(100))
NEWS_LOST = Measure("registry: changes that watchers missed", "", Goal(0), 0)
OUTAGE_FAILURES = Measure("registry away: requests that failed", "", Goal(0), 0)
OUTAGE_DELETED = Measure("registry away: models gone on its return", "", Goal(0), 0)
DEATH_NOTICED = Measure("engine killed in mid-answer: until the caller has the reason", "ms", Goal(1000))
RECOVERY = Measure("engine killed: from the notice until it takes requests again", "s", None, 2)
RELOAD = Measure("the same model loaded when nothing has happened to it", "s", None, 2)
RECOVERY_EXTRA = Measure("engine killed: what taking requests again lasts beyond a load", "s", Goal(2), 2)
GONE = Measure("host killed: until nothing that it started is left", "s", Goal(2), 2)
GUARDIAN_RSS = Measure("memory of one guardian, RSS", "MB")
IDLE_RUNNER_CPU = Measure("runner and guardian with one idle model: one core's share", "%", None, 2)
SWAP = Measure("swap: from a request for the model that has no room until its first token", "s", None, 2)
SWAP_BY_HAND = Measure("the same by hand: unload the other, load it, ask", "s", None, 2)
SWAP_EXTRA = Measure("swap: what it lasts beyond that", "s", None, 2)
LEASE = Measure("a lease on free memory, by a program, p50", "ms", None, 1)
COMMIT = Measure("a plain durable commit of one row, p50", "ms", None, 2)
PEAK_GOODPUT = Measure("overload: answers per second at what the pool can do", "1/s")
OVERLOAD_GOODPUT = Measure("overload: answers per second at five times as much, beside that", "", Goal(0.9, False), 3)
REFUSAL_P99 = Measure("overload: until a refusal is there, p99", "ms", Goal(50))
REFUSAL_ADVICE = Measure("overload: refusals without a Retry-After of 1 to 60 s", "", Goal(0), 0)
OVERLOAD_MEMORY = Measure("overload: growth of the host process's memory", "%", Goal(10))
AMPLIFICATION = Measure("total outage: requests that reach an engine, per request", "", Goal(1.2), 3)
RATE_P99 = Measure("500 unary requests/s with keys: latency p99", "ms", None, 2)
RATE_ADDED_P50 = Measure("500 unary requests/s with keys: added latency, p50", "ms", None, 2)
RATE_ADDED_P99 = Measure("500 unary requests/s with keys: added latency, p99", "ms", Goal(10), 2)
HANG_UP_P50 = Measure("hang-up in mid-answer: until the engine has its slot back, p50", "ms")
HANG_UP_P99 = Measure("hang-up in mid-answer: until the engine has its slot back, p99", "ms", Goal(250))
PREFILL_HANG_UP_P99 = Measure(
    "hang-up before the first token: until the engine has its slot back, p99", "ms", Goal(250)
)
EDGE_HANG_UP_P50 = Measure("the same through Envoy and the gateway, p50", "ms")
EDGE_HANG_UP_P99 = Measure("the same through Envoy and the gateway, p99", "ms", Goal(250))
EDGE_PREFILL_HANG_UP_P99 = Measure(
    "the same through Envoy and the gateway, before the first token, p99", "ms", Goal(250)
)
IDLE_HOST = Measure("1,000 idle open streams: memory of the host process, RSS", "MB", Goal(200))
IDLE_GROWTH = Measure("1,000 idle open streams: growth of host and runner together, RSS", "MB", Goal(30))
TASK_SUBMITS = Measure("durable tasks: acknowledged submissions, 64 clients, SQLite FULL", "1/s", Goal(1_000, False), 0)
TASK_SUBMIT_P99 = Measure("durable tasks: until an acknowledgement is there, 64 clients, p99", "ms")
TASK_COMMITS = Measure("plain durable commits of one row, one after another", "1/s", None, 0)
TASK_START_P50 = Measure("durable tasks: from claim to the engine's start, p50", "ms", Goal(20), 2)
TASK_START_P99 = Measure("durable tasks: from claim to the engine's start, p99", "ms", None, 2)
TASK_MEMORY = Measure("durable tasks: growth of the host process with 100,000 waiting", "MB")
TASK_CLAIM = {
    waiting: Measure(f"durable tasks: finding, claiming and ending one, {waiting:,} waiting", "us", None, 0)
    for waiting in (1_000, 100_000)
}
TASK_CLAIM_RATIO = Measure("durable tasks: the same with 100,000 waiting, beside 1,000", "", Goal(1.1), 3)
JOURNAL_P50 = {
    model: Measure(f"unary chats of 16 tokens, one after another, {model}, p50", "ms", None, 2)
    for model in ("plain", "journaled")
}
JOURNAL_P99 = {
    model: Measure(f"unary chats of 16 tokens, one after another, {model}, p99", "ms", None, 2)
    for model in ("plain", "journaled")
}
JOURNAL_CPU = {
    model: Measure(f"CPU of gateway and router for one of these, {model}", "us", None, 0)
    for model in ("plain", "journaled")
}
PLACEMENT_RATE = Measure("placements on one core, 1,000 runners, 10,000 queued", "1/s", Goal(20_000, False), 0)
PLACEMENT_CPU = Measure("one placement of these", "us")
PLACEMENT_BY_RUNNERS = {
    runners: Measure(f"one placement, {runners:,} runners, 10,000 queued", "us") for runners in (10, 100, 10_000)
}
PLACEMENT_BY_QUEUED = {
    queued: Measure(f"one placement, 1,000 runners, {queued:,} queued", "us") for queued in (10, 100, 1_000, 100_000)
}
