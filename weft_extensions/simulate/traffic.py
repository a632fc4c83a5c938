"""The requests of a scenario in order of arrival, drawn here so that every scheduler gets the same."""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from random import Random
from zlib import crc32

from router_svc.policy.endpoints.candidates import Needs, context_class
from router_svc.policy.router_request import Request
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import CHARS_PER_TOKEN, PREFIX_ENDS, Operation, Priority
from weft.kernel.values.names import ROUTE_PREFIX
from weft_extensions.simulate.scenario import (
    BLOCK_TOKENS,
    Pattern,
    Rate,
    Scenario,
    Tenant,
    TracedRequest,
    seeded_random,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """A request and its future, which is hidden from the scheduler."""

    arrival: Request
    output_tokens: int
    session: int
    """Number of its conversation; 0: none."""
    cached_share: float
    """Cached share of its prompt where its conversation was last served."""
    blocks: tuple[int, ...]
    """The full blocks of its prompt; empty: unknown."""
    deadline_at: float | None
    """When its answer becomes useless: its own deadline, or the end of its route's budget."""
    leaves_at: float | None
    """When its caller disconnects without content."""


def requests_of(scenario: Scenario) -> Iterator[SimulatedRequest]:
    """Yields at most `scenario.max_requests` requests, by time of arrival."""
    streams = [_Stream(scenario, number) for number in range(len(scenario.traffic))]
    due = [(at, stream.number) for stream in streams if (at := stream.next_time()) is not None]
    heapq.heapify(due)
    for key in range(1, scenario.max_requests + 1):
        if not due:
            return
        at, number = due[0]
        yield streams[number].request(key, at)
        following = streams[number].next_time()
        if following is None:
            heapq.heappop(due)
        else:
            heapq.heapreplace(due, (following, number))


class _Stream:
    def __init__(self, scenario: Scenario, number: int) -> None:
        traffic = scenario.traffic[number]
        self.number = number
        self._traffic = traffic
        self._next: TracedRequest | None = None
        self._begins = traffic.from_seconds
        until = scenario.duration_seconds if traffic.until_seconds is None else traffic.until_seconds
        self._ends = min(until, scenario.duration_seconds)
        self._facts = seeded_random(scenario.seed, f"requests/{number}")
        times = seeded_random(scenario.seed, f"times/{number}")
        self._requests = iter(traffic.recorded) if traffic.rate is None else self._drawn(_times(traffic.rate, times))
        settings = scenario.settings.tenant(traffic.tenant)
        self._allow_remote = settings.permits_remote(requested=traffic.allow_remote)
        tenant = next(
            (known for known in scenario.tenants if known.name == traffic.tenant), Tenant(name=traffic.tenant)
        )
        self._bands = tuple(tenant.priorities)
        self._shares = tuple(tenant.priorities.values())
        route = scenario.routes.get(traffic.target.removeprefix(ROUTE_PREFIX))
        budget = route.budget_seconds if route is not None and traffic.target.startswith(ROUTE_PREFIX) else None
        ends = [seconds for seconds in (traffic.deadline_seconds, budget) if seconds is not None]
        self._worth_seconds = min(ends, default=None)
        kind = scenario.kind_of(traffic.target)
        self._operation = Operation.CHAT if kind is None else kind.operation
        self._needs: dict[int, Needs] = {}
        self._salt = crc32(f"{traffic.tenant}/{number}".encode())

    def next_time(self) -> float | None:
        """Returns the next arrival; None: there is none."""
        self._next = next(self._requests, None)
        at = math.inf if self._next is None else self._begins + self._next.at_seconds
        return at if at < self._ends else None

    def _drawn(self, times: Iterator[float]) -> Iterator[TracedRequest]:
        traffic, facts = self._traffic, self._facts
        is_text = traffic.work is None
        for at in times:
            prompt_tokens = traffic.prompt_tokens.draw_count(facts) if is_text else 0
            output_tokens = max(1, traffic.output_tokens.draw_count(facts)) if is_text else 0
            yield TracedRequest(at_seconds=at, prompt_tokens=prompt_tokens, output_tokens=output_tokens, blocks=())

    def request(self, key: int, at: float) -> SimulatedRequest:
        """Returns the request that arrives at `at`, the last that `next_time` returned."""
        traffic, facts, drawn = self._traffic, self._facts, self._next
        assert drawn is not None, "a request arrives after its time is known"
        prompt_tokens, output_tokens = drawn.prompt_tokens, drawn.output_tokens
        if traffic.max_output_tokens is not None:
            output_tokens = min(output_tokens, traffic.max_output_tokens)
        session = 1 + facts.randrange(traffic.sessions) if traffic.sessions else 0
        band = self._band(facts)
        # A route's budget does not apply to durable requests.
        worth_seconds = traffic.deadline_seconds if band is Priority.DURABLE else self._worth_seconds
        spec = PlacementRequest(
            request_id="",
            tenant=traffic.tenant,
            model=traffic.target,
            operation=self._operation,
            priority=band,
            prompt_tokens=prompt_tokens,
            max_output_tokens=traffic.max_output_tokens,
            work=0.0 if traffic.work is None else traffic.work.draw(facts),
            affinity_key=f"{self.number}/{session}".encode() if session and traffic.session_affinity else b"",
            prefix_digests=(
                (self._salt, (self._salt << 32) + session) if session else prompt_digests(self._salt, drawn)
            ),
        )
        own_deadline_at = None if traffic.deadline_seconds is None else at + traffic.deadline_seconds
        return SimulatedRequest(
            arrival=Request(key, spec, self._needs_for(prompt_tokens), arrived_at=at, own_deadline_at=own_deadline_at),
            output_tokens=output_tokens,
            session=(self.number << 32) + session if session else 0,
            cached_share=traffic.session_cached_share,
            blocks=drawn.blocks[: prompt_tokens // BLOCK_TOKENS],
            deadline_at=None if worth_seconds is None else at + worth_seconds,
            leaves_at=None if traffic.patience_seconds is None else at + traffic.patience_seconds,
        )

    def _band(self, facts: Random) -> Priority:
        if len(self._bands) == 1:
            return self._bands[0]
        return facts.choices(self._bands, self._shares)[0]

    def _needs_for(self, prompt_tokens: int) -> Needs:
        context = context_class(prompt_tokens)
        known = self._needs.get(context)
        if known is None:
            known = self._needs[context] = Needs(
                operation=self._operation,
                allow_remote=self._allow_remote,
                skills=self._traffic.skills,
                context_tokens=context,
            )
        return known


def prompt_digests(salt: int, request: TracedRequest) -> tuple[int, ...]:
    """Returns the digests of a traced prompt's prefixes; see `PREFIX_ENDS`."""
    tokens = takewhile(request.prompt_tokens.__ge__, (int(end / CHARS_PER_TOKEN) for end in PREFIX_ENDS))
    blocks = (request.blocks[(end - 1) // BLOCK_TOKENS] for end in tokens) if request.blocks else ()
    return tuple((salt << 64) + (block << 8) + number for number, block in enumerate(blocks))


def _times(rate: Rate, random: Random) -> Iterator[float]:
    """Yields seconds from the start, without end."""
    at = 0.0
    if rate.pattern is Pattern.CONSTANT:
        while True:
            yield at
            at += 1 / rate.per_second
    highest = rate.per_second * (1.0 if rate.pattern is Pattern.POISSON else max(1.0, rate.factor))
    while True:
        at += random.expovariate(highest)
        # Varying rates are drawn by thinning the highest rate.
        if rate.pattern is Pattern.POISSON or random.random() * highest < _momentary(rate, at):
            yield at


def _momentary(rate: Rate, at: float) -> float:
    phase = at % rate.period_seconds
    if rate.pattern is Pattern.BURST:
        return rate.per_second * (rate.factor if phase < rate.high_seconds else 1.0)
    swing = (rate.factor - 1.0) * math.sin(2 * math.pi * phase / rate.period_seconds)
    return rate.per_second * max(0.0, 1.0 + swing)
