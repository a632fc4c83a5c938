"""What one decision of the scheduler costs: the policy alone, on one core, with a standing queue before full runners.

A placement is one request from its arrival to its end: it is submitted and waits, another one ends, the one whose turn
it is gets the slot. Ten tenants share one pool; every answer is told with the tokens that it took.

Placements of prompts, with the policy `first_token`, alone or beside another tree of weft, in turns:

    python -m bench.placements [--beside TREE] [--runs 5]
"""

import argparse
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from random import Random

from bench import measures
from bench.contender import WEFT
from bench.machine import describe_machine
from bench.report import Figures, goal_table, turn_table
from bench.scenarios import Options
from router_svc.policy.decisions import Decision, Placed, Rejects, Served
from router_svc.policy.endpoints.candidates import Candidate, Needs, Readiness
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.pool_settings import ChoicePolicy, PoolSettings, Settings
from router_svc.policy.router_request import Request
from router_svc.policy.scheduler import Scheduler
from weft.dispatch.payload_description import prefix_digests
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import Operation
from weft.kernel.values.names import DEFAULT_TENANT

RUNNERS = 1_000
QUEUED = 10_000
TENANTS = 10
PLACEMENTS = 10_000
STEP_SECONDS = 50e-6
"""Virtual time between two placements: as if they came at the goal's rate."""
NEEDS = Needs(Operation.CHAT)
SLOTS = 8
CPU_SECONDS = 1.0
"""Of one run with prompts; as much before it is not counted."""


class Crowd:
    """A pool of full runners, and a queue that is always as long."""

    def __init__(self, runners: int, queued: int) -> None:
        limits = SchedulerLimits(
            queue_depth_per_runner=(queued + 1) // runners + 2, queue_timeout_seconds=1e9, overload_after_seconds=1e9
        )
        self._scheduler = Scheduler(limits)
        self._running: deque[int] = deque()
        self._now = 0.0
        self._submitted = 0
        members = tuple(
            Candidate(
                model=f"model-{number}",
                pool="pool",
                runner=f"runner-{number}",
                incarnation="1",
                readiness=Readiness.READY,
                slots=1,
                operations=frozenset({Operation.CHAT}),
            )
            for number in range(runners)
        )
        self._scheduler.apply(MeshChange(candidates=members), self._now)
        for arrival in self.arrivals(runners + queued):
            self._now = arrival.arrived_at
            self._note(self._scheduler.submit(arrival, self._now))
        assert (self._scheduler.running, self._scheduler.waiting) == (runners, queued), "the queue is not as it should"

    def arrivals(self, count: int) -> list[Request]:
        """So many requests, of changing length, one step after the other."""
        first = self._submitted
        self._submitted += count
        return [
            Request(
                key,
                PlacementRequest(
                    request_id="",
                    tenant=f"tenant-{key % TENANTS}",
                    model="pool",
                    operation=NEEDS.operation,
                    prompt_tokens=50 + (key * 37) % 400,
                ),
                NEEDS,
                arrived_at=self._now + (key - first + 1) * STEP_SECONDS,
            )
            for key in range(first, first + count)
        ]

    def placements_seconds(self, count: int) -> float:
        """CPU seconds of one placement, over so many of them."""
        arrivals = self.arrivals(count)
        took = Served(prompt_tokens=200, cached_tokens=50, output_tokens=120)
        begin = time.process_time()
        for arrival in arrivals:
            self._now = arrival.arrived_at
            self._note(self._scheduler.finish(self._running.popleft(), self._now, took))
            self._note(self._scheduler.submit(arrival, self._now))
        seconds = time.process_time() - begin
        assert len(self._running) == self._scheduler.running, "not every end made room for one"
        return seconds / count

    def _note(self, decisions: Iterable[Decision]) -> None:
        self._running.extend(decision.key for decision in decisions if isinstance(decision, Placed))


class PromptCrowd:
    """A pool of engines full of answers, and a queue of prompts with common beginnings that is always as long."""

    def __init__(self, engines: int, waiting: int) -> None:
        settings = Settings(default_pool=PoolSettings(policy=ChoicePolicy.FIRST_TOKEN))
        self._scheduler = Scheduler(SchedulerLimits(queue_depth_per_runner=1_000), settings)
        self._engines, self._waiting = engines, waiting
        self._now = 0.0
        self._placed, self._answering = deque[int](), deque[int]()
        self._requests: dict[int, PlacementRequest] = {}
        self._submitted = 0
        members = tuple(
            Candidate(
                model=f"model-{number}",
                pool="pool",
                runner=f"runner-{number}",
                incarnation="1",
                readiness=Readiness.READY,
                slots=SLOTS,
                operations=frozenset({Operation.CHAT}),
            )
            for number in range(engines)
        )
        self._scheduler.apply(MeshChange(candidates=members), self._now)
        chance = Random(1)  # noqa: S311 - a workload
        for number in range(engines * SLOTS + waiting):
            self._submit(_prompt(number, chance))
            self._answer()
        while self._scheduler.waiting > waiting:
            self._answer()
            self._note(self._scheduler.tick(self._now))

    def placements_per_second(self, cpu_seconds: float) -> float:
        """Placements in a second of CPU time: a request arrives and waits, is placed, has its first content, ends."""
        begin, count = time.process_time(), 0
        while (passed := time.process_time() - begin) < cpu_seconds:
            self._answer()
            key = self._answering.popleft()
            request = self._requests.pop(key)
            tokens = request.prompt_tokens
            took = Served(prompt_tokens=tokens, cached_tokens=tokens // 5, output_tokens=50)
            self._note(self._scheduler.finish(key, self._now, took))
            self._submit(request)
            count += 1
        # A freed slot may stay free for a moment, as prompts wait for the engines that have their beginnings.
        assert 0 <= self._scheduler.waiting - self._waiting <= self._engines, "the queue is not as it should"
        return count / passed

    def _submit(self, request: PlacementRequest) -> None:
        self._submitted += 1
        self._requests[self._submitted] = request
        self._note(self._scheduler.submit(Request.of(self._submitted, request, self._now), self._now))

    def _answer(self) -> None:
        """Time passes, and all placed requests have their first content."""
        self._now += 0.5 / self._engines
        while self._placed:
            key = self._placed.popleft()
            self._answering.append(key)
            # Older trees return no decisions.
            self._note(self._scheduler.report_first_content(key, self._now) or ())

    def _note(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            assert not isinstance(decision, Rejects), "no request is refused"
            if isinstance(decision, Placed):
                self._placed.append(decision.key)


def _prompt(number: int, chance: Random) -> PlacementRequest:
    system = f"system prompt {int(chance.expovariate(0.5))} " * 500
    text = system + f"session {number} " * chance.choice((60, 150, 450))
    return PlacementRequest(
        request_id="",
        tenant=DEFAULT_TENANT,
        model="pool",
        operation=NEEDS.operation,
        prompt_tokens=len(text) // 4,
        max_output_tokens=100,
        seconds_left=600.0,
        prefix_digests=prefix_digests([text], ""),
    )


def measure_placements(options: Options, figures: Figures, folder: Path) -> None:
    """Fills the rows about placements."""
    del folder
    crowd = Crowd(RUNNERS, QUEUED)
    for _ in range(options.repetitions):
        figures.add(measures.PLACEMENT_RATE, WEFT.name, 1 / crowd.placements_seconds(PLACEMENTS))


def _measure_prompts(figures: Figures, trees: dict[str, Path], runs: int) -> None:
    """Measures how many prompts each tree places per second; the trees take turns, each in a process of its own."""
    for (engines, waiting), measure in measures.PROMPT_RATE.items():
        for _ in range(runs):
            for name, tree in trees.items():
                ended = subprocess.run(
                    [sys.executable, "-P", __file__, "--of", str(engines), str(waiting)],
                    env={**os.environ, "PYTHONPATH": str(tree)},
                    stdout=subprocess.PIPE,
                    check=True,
                )
                figures.add(measure, name, float(ended.stdout))


def main() -> None:
    """Print the placements of prompts of this tree and of another one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="the root of another tree")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--of", type=int, nargs=2, metavar=("ENGINES", "WAITING"), help="one run of these alone")
    given = parser.parse_args()
    if given.of is not None:
        crowd = PromptCrowd(*given.of)
        crowd.placements_per_second(CPU_SECONDS)
        print(crowd.placements_per_second(CPU_SECONDS))
        return
    root = Path(__file__).resolve().parent.parent
    machine, figures = describe_machine(root), Figures()
    trees = {WEFT.name: root} | ({} if given.beside is None else {str(given.beside): given.beside})
    _measure_prompts(figures, trees, given.runs)
    rows = figures.rows(tuple(measures.PROMPT_RATE.values()))
    print(f"commit {machine.commit}; {machine.cpu}, {machine.cores} cores, load average {machine.load_average}\n")
    for name in trees:
        print(f"{name}\n\n{goal_table(row for row in rows if row.contender == name)}\n")
    print(turn_table(rows))


if __name__ == "__main__":
    main()
