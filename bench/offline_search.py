"""A bound for routers: simulated annealing over the engine of every turn, with the whole trace known.

Each engine takes the shortest prefill of the turns that wait for it, and caches as `sessions.Engine` does. What is
found is no proof of a minimum: a router that is better shows that the search was too short.
"""

import math
import random
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from statistics import fmean

from bench.sessions import (
    BLOCK_CHARS,
    CACHED_BLOCKS,
    ENGINES,
    SLOTS,
    TOKEN_SECONDS,
    Engine,
    Workload,
    begins_at,
    engines_of,
    system_prompt,
    turns_of,
)
from weft.kernel.requests.request_values import CHARS_PER_TOKEN

BLOCK_TOKENS = int(BLOCK_CHARS / CHARS_PER_TOKEN)
GREEDY_SHARE = 0.1
"""Share of the plans that are random greedy placements; the search begins with the best."""
GREEDY_WEIGHT, GREEDY_SLOT_SECONDS = 8.0, 0.1
"""The greatest weight of a turn's own prefill beside the wait, and what a greedy placement assumes for a full slot."""
HOT, COLD = 3e-3, 1e-4
"""Temperature at the beginning and at the end, as a share of the objective."""
MEDIAN, TAIL = slice(45, 55), slice(92, 98)
"""Percentiles whose mean the search walks by, since a single one hardly ever moves with one turn."""

Plan = list[int]
"""The engine of every turn, the turns of a session side by side."""


class Trace:
    """All turns of a workload's sessions, as lists with an entry per turn or per session."""

    def __init__(self, workload: Workload) -> None:
        self.turns = workload.turns
        self.begins = [begins_at(number) for number in range(workload.sessions)]
        self.tokens, self.own_blocks = list[int](), list[int]()
        self.answer_seconds, self.pauses = list[float](), list[float]()
        self.systems, self.system_blocks = list[int](), list[int]()
        numbers: dict[str, int] = {}
        for number in range(workload.sessions):
            _, system = system_prompt(workload, number)
            self.systems.append(-1 - numbers.setdefault(system, len(numbers)))
            self.system_blocks.append(len(f"<system>{system}\n") // BLOCK_CHARS)
            for turn in turns_of(workload, number):
                self.own_blocks.append(len(turn.text) // BLOCK_CHARS - self.system_blocks[-1])
                self.tokens.append(turn.prompt_tokens)
                self.answer_seconds.append((turn.answer_tokens - 1) * TOKEN_SECONDS)
                self.pauses.append(turn.pause)


class Line:
    """An engine, the turns that wait for it, and its cache of system prompts (negative numbers) and sessions."""

    def __init__(self, engine: Engine, trace: Trace) -> None:
        self._trace, self.token_seconds, self.slowdown = trace, engine.token_seconds, engine.slowdown
        self.free_at = 0.0
        self.waiting: list[int] = []
        self.ends: list[float] = []
        self.has_event = False
        self._blocks: dict[int, int] = {}
        """Cached blocks, the least recently used first."""
        self._whole: dict[int, int] = {}
        """The same of those that lost no block; the first blocks are lost first, and the others are worth nothing."""
        self._total = 0

    def fresh_tokens(self, turn: int) -> int:
        """Returns the tokens of a turn's prompt that are not cached."""
        trace, whole = self._trace, self._whole
        session = turn // trace.turns
        system = whole.get(trace.systems[session])
        cached = 0 if system is None else system + whole.get(session, 0)
        return trace.tokens[turn] - BLOCK_TOKENS * cached

    def store(self, turn: int) -> None:
        """Cache a turn's prompt."""
        trace, blocks, whole = self._trace, self._blocks, self._whole
        session = turn // trace.turns
        system, shared, own = trace.systems[session], trace.system_blocks[session], trace.own_blocks[turn]
        self._total += shared + own - blocks.pop(system, 0) - blocks.pop(session, 0)
        blocks[system] = whole[system] = shared
        blocks[session] = whole[session] = own
        while self._total > CACHED_BLOCKS:
            part, size = next(iter(blocks.items()))
            lost = min(size, self._total - CACHED_BLOCKS)
            whole.pop(part, None)
            self._total -= lost
            if lost == size:
                del blocks[part]
            else:
                blocks[part] = size - lost

    def next(self) -> tuple[int, int]:
        """Remove the waiting turn with the shortest prefill; returns it and its tokens that are not cached."""
        if len(self.waiting) == 1:
            return self.waiting[0], self.fresh_tokens(self.waiting.pop())
        fresh = [self.fresh_tokens(turn) for turn in self.waiting]
        least = min(fresh)
        return self.waiting.pop(fresh.index(least)), least

    def used_slots(self, now: float) -> int:
        """Returns how many answers are under way."""
        ends = self.ends
        while ends and ends[0] <= now:
            heappop(ends)
        return len(ends)


Choose = Callable[[int, float, list[Line]], int]


def play(trace: Trace, lines: list[Line], choose: Choose) -> list[float]:
    """Returns the seconds to the first token of every turn. `choose` returns its engine when it arrives."""
    events = sorted((begin, number * trace.turns) for number, begin in enumerate(trace.begins))
    arrived, firsts = [0.0] * len(trace.tokens), [0.0] * len(trace.tokens)
    while events:
        now, turn = heappop(events)
        if turn >= 0:
            number, arrived[turn] = choose(turn, now, lines), now
            line = lines[number]
            line.waiting.append(turn)
            if line.has_event:
                continue
        else:
            number = -1 - turn
            line = lines[number]
            line.has_event = False
        at = line.free_at
        if at <= now and line.used_slots(now) < SLOTS:
            turn, fresh = line.next()
            line.store(turn)
            line.free_at = at = now + fresh * line.token_seconds
            firsts[turn] = at - arrived[turn]
            end = at + trace.answer_seconds[turn] * line.slowdown
            heappush(line.ends, end)
            if (turn + 1) % trace.turns:
                heappush(events, (end + trace.pauses[turn], turn + 1))
        elif at <= now:
            at = line.ends[0]
        if line.waiting:
            line.has_event = True
            heappush(events, (at, -1 - number))
    return firsts


def search(workload: Workload, plans: int) -> Plan:
    """Returns the best of so many plans, which are the same on every machine."""
    trace, engines, chance = Trace(workload), engines_of(workload), random.Random(1)  # noqa: S311 - no secret

    def played(choose: Choose) -> list[float]:
        return play(trace, [Line(engine, trace) for engine in engines], choose)

    best, best_cost, firsts = Plan(), math.inf, list[float]()
    greedy_plans = max(1, round(GREEDY_SHARE * plans))
    for _ in range(greedy_plans):
        greedy = Greedy(chance.uniform(1, GREEDY_WEIGHT), len(trace.tokens))
        found = played(greedy.choose)
        if objective(found) < best_cost:
            best, best_cost, firsts = greedy.plan, objective(found), found
    plan, cost, best_greedy = best, _smooth(firsts), best_cost
    for number in range(greedy_plans, plans):
        while (changed := _change(plan, trace, firsts, chance)) == plan:
            pass
        found = played(_following(changed))
        difference = _smooth(found) - cost
        temperature = best_greedy * HOT * (COLD / HOT) ** (number / plans)
        if difference <= 0 or chance.random() < math.exp(-difference / temperature):
            plan, cost, firsts = changed, cost + difference, found
            if objective(found) < best_cost:
                best, best_cost = plan, objective(found)
    return best


def _following(plan: Plan) -> Choose:
    return lambda turn, _now, _lines: plan[turn]


class Greedy:
    """Places each turn where its wait and its own prefill, times a weight, are least; keeps the plan."""

    def __init__(self, weight: float, turns: int) -> None:
        self._weight, self.plan = weight, [0] * turns

    def choose(self, turn: int, now: float, lines: list[Line]) -> int:
        """Returns the engine of a turn."""

        def cost(line: Line) -> float:
            owed = sum(line.fresh_tokens(each) for each in line.waiting) + self._weight * line.fresh_tokens(turn)
            over = max(0, line.used_slots(now) + len(line.waiting) - SLOTS + 1)
            return max(0.0, line.free_at - now) + owed * line.token_seconds + over * GREEDY_SLOT_SECONDS

        costs = [cost(line) for line in lines]
        self.plan[turn] = found = costs.index(min(costs))
        return found


def objective(firsts: Sequence[float]) -> float:
    """Returns p50 + p95 / 4 + mean of times to the first token."""
    ordered = sorted(firsts)
    return ordered[len(ordered) // 2] + ordered[int(len(ordered) * 0.95)] / 4 + fmean(firsts)


def _smooth(firsts: Sequence[float]) -> float:
    ordered, count = sorted(firsts), len(firsts) / 100
    median, tail = (fmean(ordered[int(at.start * count) : int(at.stop * count) + 1]) for at in (MEDIAN, TAIL))
    return median + tail / 4 + fmean(firsts)


def _change(plan: Plan, trace: Trace, firsts: Sequence[float], chance: random.Random) -> Plan:
    """Returns a plan in which a turn, most likely a slow one, and maybe those after it go elsewhere.

    Elsewhere is where the session has another turn, where another turn of its system prompt goes, or any engine.
    """
    turns, count = trace.turns, len(plan)
    turn = max((chance.randrange(count) for _ in range(chance.choice((1, 3, 3)))), key=firsts.__getitem__)
    session = turn // turns
    end = (session + 1) * turns
    kind = chance.random()
    if kind < 0.5:
        engine = plan[session * turns + chance.randrange(turns)]
    elif kind < 0.75:
        alike = [each for each, system in enumerate(trace.systems) if system == trace.systems[session]]
        engine = plan[chance.choice(alike) * turns + chance.randrange(turns)]
    else:
        engine = chance.randrange(ENGINES)
    left, changed = plan[turn], plan.copy()
    match chance.randrange(3):
        case 0:
            changed[turn] = engine
        case 1:
            changed[turn:end] = [engine] * (end - turn)
        case _:
            while turn < end and changed[turn] == left:
                changed[turn], turn = engine, turn + 1
    return changed
