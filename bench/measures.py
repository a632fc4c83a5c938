"""What is measured: names, units and goals, in the order of the table."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measure:
    """One row of the table."""

    title: str
    unit: str
    goal: float | None = None
    digits: int = 1
    at_most: bool = True
    """The side of the goal to be on; reaching it does."""

    @property
    def goal_text(self) -> str:
        """The goal as text."""
        return "-" if self.goal is None else f"{'<=' if self.at_most else '>='} {self.goal:,g} {self.unit}".rstrip()

    def verdict(self, value: float) -> str:
        """How a value stands to the goal."""
        if self.goal is None:
            return "-"
        return "met" if (value <= self.goal if self.at_most else value >= self.goal) else "missed"


UNARY_CPU = Measure("CPU per unary chat request (16 tokens)", "us", None, 0)
UNARY_MULTIPLE = Measure("CPU per unary chat request, as a multiple of the stub's for a direct one", "")
UNARY_RATE = Measure("unary chat requests", "1/s", None, 0)
CHUNK_CPU = Measure("CPU per streamed chunk, saturated", "us", 10)
CHUNK_MULTIPLE = Measure("CPU per streamed chunk, saturated, as a multiple of the stub's for a direct one", "")
CHUNK_RATE = Measure("streamed chunks, saturated", "1/s", None, 0)
UNARY_P50 = Measure("unary latency p50, 1 connection", "ms", None, 2)
UNARY_P99 = Measure("unary latency p99, 1 connection", "ms", None, 2)
ADDED_UNARY_P50 = Measure("added unary latency p50, 1 connection", "ms", 3, 2)
ADDED_UNARY_P99 = Measure("added unary latency p99, 1 connection", "ms", None, 2)
FIRST_P50 = Measure("time to first chunk p50, 1 connection", "ms", None, 2)
FIRST_P99 = Measure("time to first chunk p99, 1 connection", "ms", None, 2)
ADDED_FIRST_P50 = Measure("added time to first chunk p50, 1 connection", "ms", 3, 2)
ADDED_FIRST_P99 = Measure("added time to first chunk p99, 1 connection", "ms", None, 2)
RSS_IDLE = Measure("memory of the host process after start, RSS", "MB", 130)
RSS_LOADED = Measure("memory of the host process after load, RSS", "MB", 130)
TREE_RSS_LOADED = Measure("memory of all its processes but backends after load, RSS", "MB")
TASK_SUBMITS = Measure(
    "durable tasks: acknowledged submissions, 64 clients, SQLite FULL", "1/s", 1_000, 0, at_most=False
)
TASK_SUBMIT_P99 = Measure("durable tasks: until an acknowledgement is there, 64 clients, p99", "ms")
TASK_START_P50 = Measure("durable tasks: from claim to the engine's start, p50", "ms", 20, 2)
TASK_MEMORY = Measure("durable tasks: growth of the host process with 100,000 waiting", "MB")
TASK_CLAIM = {
    waiting: Measure(f"durable tasks: finding, claiming and ending one, {waiting:,} waiting", "us", None, 0)
    for waiting in (1_000, 100_000)
}
TASK_CLAIM_RATIO = Measure("durable tasks: the same with 100,000 waiting, beside 1,000", "", 1.1, 3)
PLACEMENT_RATE = Measure("placements on one core, 1,000 runners, 10,000 queued", "1/s", 20_000, 0, at_most=False)
PROMPT_RATE = {
    (engines, waiting): Measure(
        f"placements of prompts on one core, {engines} engines, {waiting:,} waiting", "1/s", None, 0, at_most=False
    )
    for engines, waiting in ((8, 60), (200, 1_000))
}
