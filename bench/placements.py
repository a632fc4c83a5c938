"""What one decision of the scheduler costs: the policy alone, on one core, with a standing queue before full runners.

A placement is one request from its arrival to its end: it is submitted and waits, another one ends, the one whose turn
it is gets the slot. Ten tenants share one pool; every answer is told with the tokens that it took.
"""

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from bench import measures
from bench.contender import WEFT
from bench.report import Figures
from bench.scenarios import Options
from router_svc.policy.decisions import Decision, Placed, Served
from router_svc.policy.endpoints.candidates import Candidate, Needs, Readiness
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.request import Request
from router_svc.policy.scheduler import Scheduler
from weft.kernel.placement_request import PlacementRequest
from weft.kernel.request import Operation

RUNNERS = 1_000
QUEUED = 10_000
TENANTS = 10
PLACEMENTS = 10_000
STEP_SECONDS = 50e-6
"""Virtual time between two placements: as if they came at the goal's rate."""
NEEDS = Needs(Operation.CHAT)


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


def measure_placements(options: Options, figures: Figures, folder: Path) -> None:
    """Fills the rows about placements."""
    del folder
    crowd = Crowd(RUNNERS, QUEUED)
    for _ in range(options.repetitions):
        figures.add(measures.PLACEMENT_RATE, WEFT.name, 1 / crowd.placements_seconds(PLACEMENTS))
