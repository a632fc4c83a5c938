"""Agents with tools on two models that share the memory of a host, in virtual time: how long their jobs take.

Each agent calls its model, runs a tool, and calls again with the result. Only one model fits in memory. Beside weft's
scheduler are the same scheduler that does not know of tools, and a switch that loads the model of the oldest waiting
request as soon as the other one's requests have ended. A user of one of the models asks now and then.

    python -m bench.tool_pauses
"""

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from random import Random
from statistics import fmean

from router_svc.policy.decisions import Decision, Placed, Rejects, Served, Wakes
from router_svc.policy.endpoints.candidates import Candidate, HostMemory, MemoryHolder, Readiness
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.router_request import Request
from router_svc.policy.scheduler import Scheduler
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import Operation
from weft.kernel.values.names import DEFAULT_TENANT

MODELS, HOST, GIB = ("a", "b"), "gpu", 1 << 30
SLOTS, TURNS, ANSWER_SECONDS, TOKENS = 4, 10, 2.0, 100
TICK_SECONDS = 0.25
CHAT_EVERY_SECONDS, CHATS = 45.0, 4
"""The user asks this often, so many times."""
PAUSES, LOADS = (1.0, 5.0, 20.0, 60.0, 120.0), (2.0, 5.0, 10.0, 20.0)
SEEDS = (1, 2, 3)


class Rival(StrEnum):
    """Who decides which model is loaded."""

    WEFT = "weft"
    UNAWARE = "weft without tool pauses"
    SWITCH = "switch at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Times in seconds."""

    agents: int = 8
    pause: float = 5.0
    """Mean of a tool's duration, which is exponential."""
    load: float = 10.0
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times in seconds."""

    job: float
    """Mean time of an agent's job."""
    last: float
    """When the last one ended."""
    chat: float
    """Longest wait of the user for an answer to begin."""
    loads: float


@dataclass(slots=True)
class Caller:
    """An agent, or one chat of the user."""

    model: str
    left: int
    began: float
    session: bytes = b""
    asked: float = 0.0


class World:
    """A workload under one rival, event by event."""

    def __init__(self, workload: Workload, rival: Rival) -> None:
        self._work, self._rival = workload, rival
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers, self._chance = itertools.count(1), Random(workload.seed)  # noqa: S311 - a workload
        self._callers: dict[int, Caller] = {}
        self._waiting: dict[int, float] = {}
        """For the switch: arrivals of the requests that wait."""
        self._running: dict[int, str] = {}
        self._loaded, self._loading = "", ""
        self._jobs, self._waits = list[float](), list[float]()
        self._loads, self._last = 0, 0.0
        self._scheduler = Scheduler(SchedulerLimits(queue_depth_per_runner=1_000, queue_timeout_seconds=3_600.0))
        self._show(0.0)

    def run(self) -> Outcome:
        """Returns what the callers saw."""
        for number in range(self._work.agents):
            agent = Caller(MODELS[number % 2], TURNS, float(number), b"%d" % number)
            self._at(agent.began, partial(self._ask, agent))
        for number in range(CHATS):
            began = CHAT_EVERY_SECONDS * (number + 1)
            self._at(began, partial(self._ask, Caller(MODELS[number % 2], 1, began)))
        ticks = (TICK_SECONDS * number for number in itertools.count(1))
        tick = next(ticks)
        while self._events or self._callers:
            if self._events and self._events[0][0] < tick:
                now, _, event = heapq.heappop(self._events)
                event(now)
                continue
            if self._rival is not Rival.SWITCH:
                self._obey(self._scheduler.tick(tick), tick)
            tick = next(ticks)
        return Outcome(fmean(self._jobs), self._last, max(self._waits), self._loads)

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def _ask(self, caller: Caller, now: float) -> None:
        key, caller.asked = next(self._numbers), now
        self._callers[key] = caller
        if self._rival is Rival.SWITCH:
            self._waiting[key] = now
            self._switch(now)
            return
        spec = PlacementRequest(
            request_id="",
            tenant=DEFAULT_TENANT,
            model=caller.model,
            operation=Operation.CHAT,
            max_output_tokens=TOKENS,
            affinity_key=caller.session if self._rival is Rival.WEFT else b"",
        )
        self._obey(self._scheduler.submit(Request.of(key, spec, now), now), now)

    def _obey(self, decisions: Iterable[Decision], now: float) -> None:
        for decision in decisions:
            match decision:
                case Rejects():
                    raise RuntimeError(decision.message)
                case Placed():
                    self._serve(decision.key, now)
                case Wakes():
                    self._load(decision.model, now)
                case _:
                    pass

    def _serve(self, key: int, now: float) -> None:
        caller = self._callers[key]
        assert caller.model == self._loaded, "a model that is not loaded serves nobody"
        self._running[key] = caller.model
        if not caller.session:
            self._waits.append(now - caller.asked)
        self._at(now + ANSWER_SECONDS, partial(self._answer, key))

    def _answer(self, key: int, now: float) -> None:
        caller = self._callers.pop(key)
        del self._running[key]
        caller.left -= 1
        if caller.left:
            self._at(now + self._chance.expovariate(1 / self._work.pause), partial(self._ask, caller))
        elif caller.session:
            self._jobs.append(now - caller.began)
            self._last = now
        if self._rival is Rival.SWITCH:
            self._switch(now)
            return
        served = Served(
            prompt_tokens=TOKENS, cached_tokens=0, output_tokens=TOKENS, awaits_tool_results=caller.left > 0
        )
        self._obey(self._scheduler.report_first_content(key, now), now)
        self._obey(self._scheduler.finish(key, now, served), now)

    def _load(self, model: str, now: float) -> None:
        assert not self._running, "the other model is evicted once it is idle"
        self._loaded, self._loading = "", model
        self._loads += 1
        self._show(now)
        self._at(now + self._work.load, self._end_load)

    def _end_load(self, now: float) -> None:
        model = self._loaded = self._loading
        self._loading = ""
        if self._rival is Rival.SWITCH:
            self._switch(now)
            return
        self._obey(self._scheduler.wake_finished(model, None, now), now)
        self._show(now)

    def _switch(self, now: float) -> None:
        """Serve the oldest request, and those of its model that find a slot."""
        while self._waiting and not self._loading:
            key = next(iter(self._waiting))
            model = self._callers[key].model
            if model != self._loaded:
                if not self._running:
                    self._load(model, now)
                return
            if len(self._running) >= SLOTS:
                return
            del self._waiting[key]
            self._serve(key, now)

    def _show(self, now: float) -> None:
        if self._rival is Rival.SWITCH:
            return
        held = tuple(
            MemoryHolder(name=model, is_model=True, held_bytes=5 * GIB)
            for model in (self._loaded, self._loading)
            if model
        )
        memory = HostMemory(host=HOST, total_bytes=8 * GIB, free_bytes=(8 - 5 * len(held)) * GIB, holders=held)
        shown = tuple(map(self._candidate, MODELS))
        self._obey(self._scheduler.apply(MeshChange(candidates=shown, hosts={HOST: memory}), now), now)

    def _candidate(self, model: str) -> Candidate:
        states = {self._loaded: Readiness.READY, self._loading: Readiness.LOADING}
        return Candidate(
            model=model,
            pool=model,
            runner=f"runner-{model}",
            incarnation="1",
            readiness=states.get(model, Readiness.ASLEEP),
            slots=SLOTS,
            operations=frozenset({Operation.CHAT}),
            host=HOST,
            memory_bytes=5 * GIB,
            max_wake_seconds=60.0,
            usual_load_seconds=self._work.load,
        )


def outcome(workload: Workload, rival: Rival) -> Outcome:
    """Returns the means over the seeds."""
    found = [World(replace(workload, seed=seed), rival).run() for seed in SEEDS]
    means = (fmean(getattr(each, name) for each in found) for name in ("job", "last", "chat", "loads"))
    return Outcome(*means)


def main() -> None:
    """Print a table."""
    print("| load s | tools s | router | job s | last job s | longest wait of the user s | loads |")
    print("|---|---|---|---|---|---|---|")
    for load, pause in itertools.product(LOADS, PAUSES):
        for rival in Rival:
            each = outcome(Workload(load=load, pause=pause), rival)
            figures = (each.job, each.last, each.chat, each.loads)
            print(f"| {load:g} | {pause:g} | {rival} | {' | '.join(f'{figure:.0f}' for figure in figures)} |")


if __name__ == "__main__":
    main()
