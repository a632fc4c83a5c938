"""Where prompts go: first_token and the other policies beside a router that sees everything, in virtual time.

Eight engines with prefix caches, each with one prefill at a time and eight slots; sessions of several turns over a few
shared system prompts. The scheduler is the product's; engines and callers are simulated, so the figures do not depend
on this machine. `oracle` sees all caches and queues: it minimizes the prefill that is owed and its own.

    python -m bench.routing [--seeds 5]
"""

import argparse
import hashlib
import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import mean

from router_svc.policy.decisions import Decision, Placed, Rejects, Served
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.request import Request as Queued
from router_svc.policy.scheduler import Scheduler
from router_svc.policy.settings import ChoicePolicy, PoolSettings, Settings
from weft.dispatch.payload_description import prefix_digests
from weft.dispatch.prefix_holders import PrefixHolders
from weft.kernel.names import DEFAULT_TENANT
from weft.kernel.placement_request import PlacementRequest, PrefixHolder
from weft.kernel.request import CHARS_PER_TOKEN, Operation

ENGINES, SLOTS = 8, 8
CACHED_BLOCKS = 2_600
BLOCK_CHARS = 64
SYSTEM_PROMPTS, SYSTEM_CHARS = 6, 8_000
USER_CHARS = (120, 400, 1_200)
ANSWER_TOKENS = (12, 24, 48)
TOKEN_SECONDS = 8e-3
FULL_SECONDS = 0.3
"""What the oracle assumes a request waits for a slot of a full engine."""
TICK_SECONDS = 0.25
WORDS = ("river", "stone", "cloud", "engine", "table", "green", "quick", "seven", "lamp", "north", "paper", "glass")
POPULARITY = {"skewed": 0.7, "zipf": 1.1}
"""Rate of the exponential, and exponent of the Zipf distribution, by which sessions choose a system prompt."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What callers ask, of which engines."""

    prefill_ms: float = 0.1
    """Milliseconds per prompt token."""
    sessions: int = 64
    turns: int = 8
    seed: int = 1
    unequal: bool = False
    """Whether every second engine is half as fast."""
    zipf: bool = False
    named: bool = False
    """Whether requests name their session."""
    failover_after: int | None = None
    """Number of ended requests after which another router leads, which knows of none; None: never."""


@dataclass(eq=False)
class Session:
    """One conversation."""

    number: int
    random: random.Random
    text: str
    turn: int = 0


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


@dataclass(eq=False)
class Engine:
    """An engine with a prefix cache, one prefill at a time and SLOTS answers."""

    slowdown: float
    token_seconds: float
    """Prefill of one prompt token."""
    cache: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    prefilling: deque[int] = field(default_factory=deque)
    waiting: deque[int] = field(default_factory=deque)
    under_way: int = 0
    """Its requests, those that wait for a slot included."""
    is_prefilling: bool = False
    owed_seconds: float = 0.0

    def cached(self, blocks: Iterable[bytes]) -> int:
        """Returns the tokens of the longest cached prefix."""
        count = sum(1 for _ in itertools.takewhile(self.cache.__contains__, blocks))
        return int(count * BLOCK_CHARS / CHARS_PER_TOKEN)

    def own_seconds(self, tokens: int, blocks: Iterable[bytes]) -> float:
        """Returns how long the prefill of a prompt takes."""
        return (tokens - self.cached(blocks)) * self.token_seconds

    def cost(self, tokens: int, blocks: Iterable[bytes]) -> float:
        """Returns what the oracle minimizes: the prefill that is owed, that of the prompt, and the wait for a slot."""
        return self.owed_seconds + self.own_seconds(tokens, blocks) + max(0, self.under_way - SLOTS + 1) * FULL_SECONDS

    def owe(self, seconds: float) -> None:
        """Add prefill that is owed; negative: it is done."""
        self.owed_seconds += seconds

    def store(self, blocks: Iterable[bytes]) -> None:
        """Cache a prompt; the least recently used blocks are evicted."""
        for block in blocks:
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > CACHED_BLOCKS:
            self.cache.popitem(last=False)


def engines_of(workload: Workload) -> list[Engine]:
    """Returns the engines of a workload."""
    slowdowns = (2.0 if workload.unequal and number % 2 else 1.0 for number in range(ENGINES))
    return [Engine(slowdown, slowdown * workload.prefill_ms / 1_000) for slowdown in slowdowns]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Times to the first token in seconds, and the share of prompt tokens that came from a cache."""

    p50: float
    p95: float
    average: float
    cached_share: float


class World:
    """One workload under one router, event by event."""

    def __init__(self, workload: Workload, policy: ChoicePolicy | None) -> None:
        """`policy` None: the oracle."""
        self._work = workload
        self._engines = engines_of(workload)
        self._scheduler = None if policy is None else _scheduler(policy)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers, self._keys = itertools.count(), itertools.count(1)
        self._requests: dict[int, Request] = {}
        self._ended: list[Request] = []
        self._policy, self._holders = policy, PrefixHolders()

    def run(self) -> Outcome:
        """Returns what callers saw."""
        for number in range(self._work.sessions):
            self._at(random.Random(number).random() * 3, partial(self._begin, number))  # noqa: S311 - a workload
        tick = TICK_SECONDS
        while self._events:
            now, _, event = heapq.heappop(self._events)
            while self._scheduler is not None and tick <= now:
                self._obey(self._scheduler.tick(tick), tick)
                tick += TICK_SECONDS
            event(now)
        times = sorted(request.first - request.began for request in self._ended)
        at = [times[int(len(times) * share)] for share in (0.5, 0.95)]
        return Outcome(p50=at[0], p95=at[1], average=mean(times), cached_share=_cached_share(self._ended))

    def shares(self, window: int = 64) -> list[float]:
        """Returns the cached share before the failover, of the requests of the window after it, and of the next."""
        self.run()
        middle, placed = self._work.failover_after or 0, sorted(self._ended, key=lambda request: request.placed)
        return [_cached_share(placed[middle + window * shift :][:window]) for shift in (-1, 0, 1)]

    def _fail_over(self, now: float) -> None:
        """Replace the router by one that knows no request. Waiting ones are submitted again; running ones continue."""
        assert self._policy is not None, "an oracle needs no successor"
        self._scheduler = _scheduler(self._policy)
        for key, request in list(self._requests.items()):
            if request.engine is None:
                self._submit(key, request, now)

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def _begin(self, number: int, now: float) -> None:
        chance, system = system_prompt(self._work, number)
        self._ask(Session(number, chance, f"<system>{system}\n"), now)

    def _ask(self, session: Session, now: float) -> None:
        session.text += f"<user>{words(session.random.choice(USER_CHARS), session.random)}\n"
        key = next(self._keys)
        request = self._requests[key] = Request(
            session,
            now,
            blocks_of(session.text),
            int(len(session.text) / CHARS_PER_TOKEN),
            session.random.choice(ANSWER_TOKENS),
        )
        self._submit(key, request, now)

    def _submit(self, key: int, request: Request, now: float) -> None:
        if self._scheduler is None:
            self._place_by_sight(key, request, now)
            return
        request.router, session = self._scheduler, request.session
        digests = prefix_digests([session.text], "")
        spec = PlacementRequest(
            request_id="",
            tenant=DEFAULT_TENANT,
            model="p",
            operation=Operation.CHAT,
            prompt_tokens=request.prompt_tokens,
            max_output_tokens=request.answer_tokens,
            seconds_left=600.0,  # the gateway's default
            prefix_digests=digests,
            prefix_holder=self._holders.find(digests),
            affinity_key=b"%d" % session.number if self._work.named else b"",
        )
        self._obey(self._scheduler.submit(Queued.of(key, spec, now), now), now)

    def _place_by_sight(self, key: int, request: Request, now: float) -> None:
        engine = min(self._engines, key=lambda each: each.cost(request.prompt_tokens, request.blocks))
        seconds = engine.own_seconds(request.prompt_tokens, request.blocks)
        engine.owe(seconds)
        self._at(now + seconds, lambda _: engine.owe(-seconds))
        self._place(key, engine, now)

    def _obey(self, decisions: Iterable[Decision], now: float) -> None:
        for decision in decisions:
            if isinstance(decision, Rejects):
                raise RuntimeError(decision.message)  # noqa: TRY004 - it is no wrong type
            if isinstance(decision, Placed):
                digests = prefix_digests([self._requests[decision.key].session.text], "")
                self._holders.note(digests, PrefixHolder(*decision.candidate.key, len(digests)))
                self._place(decision.key, self._engines[int(decision.candidate.model)], now)

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
            self._scheduler.report_first_content(key, now)
        seconds = (request.answer_tokens - 1) * TOKEN_SECONDS * engine.slowdown
        self._at(now + seconds, lambda then: self._end(key, request, engine, then))
        self._prefill(engine, now)

    def _end(self, key: int, request: Request, engine: Engine, now: float) -> None:
        self._ended.append(self._requests.pop(key))
        engine.under_way -= 1
        if engine.waiting:
            self._begin_prefill(engine.waiting.popleft(), engine, now)
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
        session.text += f"<assistant>{'word ' * request.answer_tokens}\n"
        session.turn += 1
        if session.turn < self._work.turns:
            self._at(now + 0.2 + session.random.random(), lambda then: self._ask(session, then))


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


def system_prompt(workload: Workload, session: int) -> tuple[random.Random, str]:
    """Returns the source of a session's random choices, and the system prompt that it has drawn."""
    chance = random.Random(workload.seed * 1_000 + session)  # noqa: S311 - a workload
    zipf, skewed = POPULARITY["zipf"], POPULARITY["skewed"]
    drawn = chance.paretovariate(zipf) - 1 if workload.zipf else chance.expovariate(skewed)
    number = min(int(drawn), SYSTEM_PROMPTS - 1)
    return chance, words(SYSTEM_CHARS, random.Random(100 + number))  # noqa: S311 - a workload


def words(chars: int, chance: random.Random) -> str:
    """Returns random words of at least so many characters."""
    words, left = list[str](), chars
    while left > 0:
        words.append(chance.choice(WORDS))
        left -= len(words[-1]) + 1
    return " ".join(words)


def blocks_of(text: str) -> Sequence[bytes]:
    """Returns digests of ever longer prefixes of a text, one per block."""
    digest, found = b"", []
    for start in range(0, len(text) - BLOCK_CHARS + 1, BLOCK_CHARS):
        digest = hashlib.blake2b(digest + text[start : start + BLOCK_CHARS].encode(), digest_size=12).digest()
        found.append(digest)
    return found


def outcome(workload: Workload, policy: ChoicePolicy | None, seeds: int) -> Outcome:
    """Returns what callers of a workload see with a policy (None: with the oracle), the mean over several seeds."""
    found = [World(replace(workload, seed=seed), policy).run() for seed in range(1, seeds + 1)]
    return Outcome(**{name: mean(getattr(each, name) for each in found) for name in Outcome.__slots__})


def main() -> None:
    """Print a table of all workloads and policies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    workloads: dict[str, Workload] = {}
    for ms in (0.1, 0.4):
        usual = Workload(prefill_ms=ms)
        workloads |= {
            f"{ms} ms per prompt token": usual,
            f"{ms} ms, sessions named": replace(usual, named=True),
            f"{ms} ms, unequal engines": replace(usual, unequal=True),
            f"{ms} ms, Zipf 1.1": replace(usual, zipf=True),
            f"{ms} ms, 160 sessions": replace(usual, sessions=160),
        }
    print("| workload | router | first token p50 ms | p95 | mean | cached share |\n|---|---|---|---|---|---|")
    for title, workload in workloads.items():
        for policy in (None, ChoicePolicy.FIRST_TOKEN, ChoicePolicy.LEAST_LOADED, ChoicePolicy.ROUND_ROBIN):
            found = outcome(workload, policy, given.seeds)
            times = (f"{each * 1_000:,.0f}" for each in (found.p50, found.p95, found.average))
            name = "oracle" if policy is None else policy.value
            print(f"| {title} | {name} | {' | '.join(times)} | {found.cached_share:.3f} |", flush=True)
    for title, workload in workloads.items():
        shares = [
            World(replace(workload, seed=seed, failover_after=5 * workload.sessions), ChoicePolicy.FIRST_TOKEN).shares()
            for seed in range(1, given.seeds + 1)
        ]
        before, *after = (f"{mean(each):.3f}" for each in zip(*shares, strict=True))
        print(f"{title}: {before} before a failover, {after} in the 64 requests after it and the next 64", flush=True)


if __name__ == "__main__":
    main()
