"""Where prompts go: first_token, other policies and a model of smg beside an offline search, in virtual time.

Eight engines with prefix caches, each with one prefill at a time and eight slots; sessions of several turns over a few
shared system prompts. The scheduler is the product's; engines and callers are simulated, so the figures do not depend
on this machine. `search` knows all turns beforehand (see `offline_search`); its plans count for each seed of a row.

    python -m bench.routing [--seeds 5] [--first-seed 1] [--search-plans 20000] [--only "160 sessions"]
"""

import argparse
import heapq
import itertools
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from statistics import mean

from bench.offline_search import Plan, search
from bench.sessions import (
    ENGINES,
    SLOTS,
    TOKEN_SECONDS,
    Engine,
    Turn,
    Workload,
    begins_at,
    blocks_of,
    engines_of,
    turns_of,
)
from bench.smg_model import SmgModel
from bench.traces import SHAPES, write
from router_svc.policy.decisions import Decision, Placed, Rejects, Served
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.pool_settings import ChoicePolicy, PoolSettings, Settings
from router_svc.policy.router_request import Request as Queued
from router_svc.policy.scheduler import Scheduler
from weft.dispatch.payload_description import prefix_digests
from weft.dispatch.prefix_holders import PrefixHolders
from weft.kernel.requests.placement_request import PlacementRequest, PrefixHolder
from weft.kernel.requests.request_values import Operation, Priority
from weft.kernel.values.names import DEFAULT_TENANT
from weft_extensions.simulate.engine import Simulation
from weft_extensions.simulate.metrics import Waits
from weft_extensions.simulate.scenario_file import load_scenario

TICK_SECONDS = 0.25
GROUPS_TITLE = "0.4 ms, tenants and priorities"
GROUPS = {"few": 8, "many": 120, "low": 16}
"""Sessions of a row with two tenants. Those of `low` are of the tenant `many` too, with a low priority."""


@dataclass(eq=False)
class Session:
    """One conversation."""

    number: int
    turns: Sequence[Turn]
    group: str
    turn: int = 0

    @property
    def now(self) -> Turn:
        """Its present turn."""
        return self.turns[self.turn]


@dataclass(eq=False)
class Request:
    """One turn of a session, and what became of it."""

    session: Session
    began: float
    blocks: Sequence[bytes]
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int = 0
    first: float = 0.0
    engine: "Engine | None" = None
    placed: float = 0.0
    router: Scheduler | None = None
    """The router that knows of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Times to the first token in seconds, and the share of prompt tokens that came from a cache."""

    p50: float
    p95: float
    average: float
    cached_share: float
    longest: float

    @staticmethod
    def of(requests: Sequence[Request]) -> "Outcome":
        """Returns the outcome of requests."""
        times = sorted(request.first - request.began for request in requests)
        p50, p95 = (times[int(len(times) * share)] for share in (0.5, 0.95))
        return Outcome(p50=p50, p95=p95, average=mean(times), cached_share=_cached_share(requests), longest=times[-1])


class World:
    """One workload under one router, event by event."""

    def __init__(self, workload: Workload, policy: ChoicePolicy | SmgModel | Plan) -> None:
        self._work = workload
        self._engines = engines_of(workload)
        self._scheduler = _scheduler(policy) if isinstance(policy, ChoicePolicy) else None
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers, self._keys = itertools.count(), itertools.count(1)
        self._requests: dict[int, Request] = {}
        self._ended: list[Request] = []
        self._policy, self._holders = policy, PrefixHolders()
        self._planned: dict[Engine, list[int]] = {}
        self._opens_at: float | None = None

    def run(self) -> Outcome:
        """Returns what callers saw."""
        for number in range(self._work.sessions):
            self._at(begins_at(number), partial(self._begin, number))
        tick = TICK_SECONDS
        while self._events:
            now, _, event = heapq.heappop(self._events)
            while self._scheduler is not None and tick <= now:
                self._obey(self._scheduler.tick(tick), tick)
                tick += TICK_SECONDS
            event(now)
        return Outcome.of(self._ended)

    def by_group(self) -> dict[str, Outcome]:
        """Returns what callers of each group saw."""
        self.run()
        asked = {name: [each for each in self._ended if each.session.group == name] for name in self._work.groups}
        return {name: Outcome.of(requests) for name, requests in asked.items()}

    def shares(self, window: int = 64) -> list[float]:
        """Returns the cached share before the failover, of the requests of the window after it, and of the next."""
        self.run()
        middle, placed = self._work.failover_after or 0, sorted(self._ended, key=lambda request: request.placed)
        return [_cached_share(placed[middle + window * shift :][:window]) for shift in (-1, 0, 1)]

    def _fail_over(self, now: float) -> None:
        """Replace the router by one that knows no request. Waiting ones are submitted again; running ones continue."""
        assert isinstance(self._policy, ChoicePolicy), "only the scheduler forgets"
        self._scheduler = _scheduler(self._policy)
        for key, request in list(self._requests.items()):
            if request.engine is None:
                self._submit(key, request, now)

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def _begin(self, number: int, now: float) -> None:
        groups = [name for name, sessions in self._work.groups.items() for _ in range(sessions)]
        group = groups[number] if groups else DEFAULT_TENANT
        self._ask(Session(number, turns_of(self._work, number), group), now)

    def _ask(self, session: Session, now: float) -> None:
        turn, key = session.now, next(self._keys)
        blocks = blocks_of(turn.text)
        request = self._requests[key] = Request(session, now, blocks, turn.prompt_tokens, turn.answer_tokens)
        self._submit(key, request, now)

    def _submit(self, key: int, request: Request, now: float) -> None:
        if isinstance(self._policy, SmgModel):
            self._place(key, self._engines[self._policy.choose(request.blocks, self._engines)], now)
            return
        session = request.session
        if isinstance(self._policy, list):
            engine = self._engines[self._policy[session.number * self._work.turns + session.turn]]
            self._planned.setdefault(engine, []).append(key)
            self._place_planned(engine, now)
            return
        assert self._scheduler is not None, "the other policies need none"
        request.router = self._scheduler
        digests = prefix_digests([session.now.text], "")
        spec = PlacementRequest(
            request_id="",
            tenant="many" if session.group == "low" else session.group,
            model="p",
            operation=Operation.CHAT,
            priority=Priority.LOW if session.group == "low" else Priority.NORMAL,
            prompt_tokens=request.prompt_tokens,
            max_output_tokens=request.answer_tokens,
            seconds_left=600.0,  # the gateway's default
            prefix_digests=digests,
            prefix_holder=self._holders.find(digests),
            affinity_key=b"%d" % session.number if self._work.named else b"",
        )
        self._obey(self._scheduler.submit(Queued.of(key, spec, now), now), now)

    def _place_planned(self, engine: Engine, now: float) -> None:
        """Places the shortest prompt that is planned for an engine, if the engine can begin with it now."""
        planned = self._planned.get(engine)
        if planned and not engine.is_prefilling and engine.under_way < SLOTS:
            requests = [self._requests[key] for key in planned]
            seconds = [engine.own_seconds(each.prompt_tokens, each.blocks) for each in requests]
            self._place(planned.pop(seconds.index(min(seconds))), engine, now)

    def _obey(self, decisions: Iterable[Decision], now: float) -> None:
        for decision in decisions:
            if isinstance(decision, Rejects):
                raise RuntimeError(decision.message)  # noqa: TRY004 - it is no wrong type
            if isinstance(decision, Placed):
                digests = prefix_digests([self._requests[decision.key].session.now.text], "")
                self._holders.note(digests, PrefixHolder(*decision.candidate.key, len(digests)))
                self._place(decision.key, self._engines[int(decision.candidate.model)], now)
        if self._scheduler is not None:
            at = self._scheduler.opens_at(now)
            if at is not None and at != self._opens_at:
                self._opens_at = at
                self._at(at, self._proceed)

    def _proceed(self, now: float) -> None:
        if self._scheduler is not None and now == self._opens_at:
            self._obey(self._scheduler.proceed(now), now)

    def _place(self, key: int, engine: Engine, now: float) -> None:
        self._requests[key].engine, self._requests[key].placed = engine, now
        engine.under_way += 1
        if engine.under_way > SLOTS:
            engine.waiting.append(key)
        else:
            self._begin_prefill(key, engine, now)

    def _begin_prefill(self, key: int, engine: Engine, now: float) -> None:
        engine.prefilling.append(key)
        if not engine.is_prefilling:
            self._prefill(engine, now)

    def _prefill(self, engine: Engine, now: float) -> None:
        engine.is_prefilling = bool(engine.prefilling)
        if engine.prefilling:
            key = engine.prefilling.popleft()
            request = self._requests[key]
            request.cached_tokens = engine.cached(request.blocks)
            seconds = engine.own_seconds(request.prompt_tokens, request.blocks)
            engine.store(request.blocks)
            self._at(now + seconds, lambda then: self._answer(key, request, engine, then))

    def _answer(self, key: int, request: Request, engine: Engine, now: float) -> None:
        request.first = now
        if self._scheduler is not None and request.router is self._scheduler:
            self._obey(self._scheduler.report_first_content(key, now), now)
        seconds = (request.answer_tokens - 1) * TOKEN_SECONDS * engine.slowdown
        self._at(now + seconds, lambda then: self._end(key, request, engine, then))
        self._prefill(engine, now)
        self._place_planned(engine, now)

    def _end(self, key: int, request: Request, engine: Engine, now: float) -> None:
        self._ended.append(self._requests.pop(key))
        engine.under_way -= 1
        if engine.waiting:
            self._begin_prefill(engine.waiting.popleft(), engine, now)
        self._place_planned(engine, now)
        if len(self._ended) == self._work.failover_after:
            self._fail_over(now)
        if self._scheduler is not None and request.router is self._scheduler:
            served = Served(
                prompt_tokens=request.prompt_tokens,
                cached_tokens=request.cached_tokens,
                output_tokens=request.answer_tokens,
            )
            self._obey(self._scheduler.finish(key, now, served), now)
        session = request.session
        at = now + session.now.pause
        session.turn += 1
        if session.turn < len(session.turns):
            self._at(at, lambda then: self._ask(session, then))


def _scheduler(policy: ChoicePolicy) -> Scheduler:
    scheduler = Scheduler(settings=Settings(default_pool=PoolSettings(policy=policy)))
    candidates = tuple(
        Candidate(
            model=str(number),
            pool="p",
            runner=f"r{number}",
            incarnation="1",
            readiness=Readiness.READY,
            slots=SLOTS,
            operations=frozenset({Operation.CHAT}),
            context_tokens=32_768,
        )
        for number in range(ENGINES)
    )
    scheduler.apply(MeshChange(candidates=candidates), 0.0)
    return scheduler


def _cached_share(requests: Sequence[Request]) -> float:
    return sum(each.cached_tokens for each in requests) / sum(each.prompt_tokens for each in requests)


class Rival(StrEnum):
    """Whom a row compares."""

    SEARCH = "search"
    SMG = "model of smg"
    FIRST_TOKEN = ChoicePolicy.FIRST_TOKEN.value
    LEAST_LOADED = ChoicePolicy.LEAST_LOADED.value
    ROUND_ROBIN = ChoicePolicy.ROUND_ROBIN.value


def outcome(workload: Workload, rival: Rival, seeds: Iterable[int], search_plans: int = 1_000) -> Outcome:
    """Returns what callers of a workload see, the mean over several seeds."""
    found = [World(each, _policy(each, rival, search_plans)).run() for each in _seeded(workload, seeds)]
    return Outcome(**{name: mean(getattr(each, name) for each in found) for name in Outcome.__slots__})


def _policy(workload: Workload, rival: Rival, search_plans: int) -> ChoicePolicy | SmgModel | Plan:
    if rival is Rival.SEARCH:
        return search(workload, search_plans)
    return SmgModel() if rival is Rival.SMG else ChoicePolicy(rival.value)


def _seeded(workload: Workload, seeds: Iterable[int]) -> list[Workload]:
    return [replace(workload, seed=seed) for seed in seeds]


def workloads() -> dict[str, Workload]:
    """Returns the workload of each row, by its title."""
    found: dict[str, Workload] = {}
    for ms in (0.1, 0.4):
        usual = Workload(prefill_ms=ms)
        found |= {
            f"{ms} ms per prompt token": usual,
            f"{ms} ms, sessions named": replace(usual, named=True),
            f"{ms} ms, unequal engines": replace(usual, unequal=True),
            f"{ms} ms, Zipf 1.1": replace(usual, zipf=True),
            f"{ms} ms, 160 sessions": replace(usual, sessions=160),
        }
    return found


def main() -> None:
    """Print tables of all workloads, tenants and traces."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--search-plans", type=int, default=20_000, help="plans tried per row and seed; 0: none")
    parser.add_argument("--only", default="", help="rows whose title has this text")
    given = parser.parse_args()
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    rows = {title: workload for title, workload in workloads().items() if given.only in title}
    print("| workload | router | first token p50 ms | p95 | mean | longest | cached share |")
    print("|---|---|---|---|---|---|---|")
    for title, workload in rows.items():
        for rival in Rival:
            if rival is not Rival.SEARCH or given.search_plans:
                _print(title, rival, outcome(workload, rival, seeds, given.search_plans))
    if given.only in GROUPS_TITLE:
        crowd = Workload(prefill_ms=0.4, sessions=sum(GROUPS.values()), groups=GROUPS)
        for each in _seeded(crowd, seeds):
            for group, found in World(each, ChoicePolicy.FIRST_TOKEN).by_group().items():
                _print(f"{GROUPS_TITLE}, seed {each.seed}: {group}", Rival.FIRST_TOKEN, found)
    for name in SHAPES:
        title = f"trace {name}, {SHAPES[name]['turns']:g} turns"
        if given.only in title:
            _print(title, Rival.FIRST_TOKEN, replayed(name))
    for title, workload in rows.items():
        shares = [
            World(replace(each, failover_after=5 * each.sessions), ChoicePolicy.FIRST_TOKEN).shares()
            for each in _seeded(workload, seeds)
        ]
        before, *after = (f"{mean(each):.3f}" for each in zip(*shares, strict=True))
        print(f"{title}: {before} before a failover, {after} in the 64 requests after it and the next 64", flush=True)


def replayed(name: str) -> Outcome:
    """Returns what callers of a trace of `bench.traces` see."""
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        scenario = load_scenario(write(name, Path(folder)))
    simulation = Simulation(scenario, Scheduler(scenario.limits, scenario.settings))
    simulation.run()
    total = simulation.metrics.total()
    waits = Waits.of(total.first_tokens)
    assert waits is not None, "a trace has requests"
    return Outcome(
        p50=waits.p50,
        p95=waits.p95,
        average=mean(total.first_tokens),
        cached_share=total.cached_tokens / total.prompt_tokens,
        longest=waits.longest,
    )


def _print(title: str, rival: Rival, found: Outcome) -> None:
    times = (f"{each * 1_000:,.0f}" for each in (found.p50, found.p95, found.average, found.longest))
    print(f"| {title} | {rival} | {' | '.join(times)} | {found.cached_share:.3f} |", flush=True)


if __name__ == "__main__":
    main()
