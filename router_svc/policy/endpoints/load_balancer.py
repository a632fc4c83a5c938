"""Load balancing: which endpoint of a pool a request gets, by policy.

- first_token: the endpoint with the lowest expected time to the first token (`first_token.py`), or the session's last
  endpoint unless another is clearly sooner. If that endpoint takes no prompt now, the request waits for it;
  least_loaded for requests without a prompt;
- least_loaded: the endpoint with the lowest share of slots in use, engine figures included;
- round_robin: the least recently granted endpoint;
- random: any free endpoint with equal probability.

The last three send a request with a session to its last endpoint if that is free.

A new policy is a rank of the free endpoints (like `by_turn`) or a function that picks one of them (like `draw`).
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from operator import attrgetter
from typing import NamedTuple

from router_svc.policy.endpoints.candidates import CandidateKey, EngineKey
from router_svc.policy.endpoints.choice import PickRequest
from router_svc.policy.endpoints.first_token import Busy, FirstToken, Line, Speeds, first_token
from router_svc.policy.endpoints.further_turns import FurtherTurns
from router_svc.policy.endpoints.pool import Endpoint, EndpointGroup, Pool, Rank
from router_svc.policy.endpoints.prefix_affinity import NO_HIT, PrefixCaches, moves_of, tokens_of
from router_svc.policy.pool_settings import ChoicePolicy
from weft.kernel.requests.placement_request import PrefixHolder

LEAST_LOADED, SESSION_AFFINITY = "least_loaded", "session_affinity"
"""Names of choices in decisions, logs and explanations, in addition to the policies' names."""
MAX_SCORED = 64
"""Maximum free endpoints that are scored; if there are more, those with a cached prefix and the least loaded."""
MAX_SCORED_OF_MANY = 16
SESSION_GATE_SECONDS = 1.0
SESSION_GATE_SHARE = 0.25
"""A session moves only if another endpoint is sooner by more than both: its later turns need the cache."""
DELAY_EXPONENT = 3
"""A prompt also delays those after it, so its own prefill counts CROWD_WEIGHT more times the share of the pool's
endpoints that process prompts, to this power (`python -m bench.routing`)."""
CROWD_WEIGHT = 3.0
MAX_DRAWS = 8
"""Random draws that may hit excluded endpoints before the next endpoint that is not excluded is used."""
_order = attrgetter("rank", "key")
_MASK = (1 << 64) - 1


def by_load(endpoint: Endpoint) -> Rank:
    """Rank by the share of slots in use, then by the load that the runner reports, then by the oldest grant.

    The share counts granted slots, corrected by engine figures, as a router that has just started knows of no grants.
    """
    candidate = endpoint.candidate
    return (endpoint.share, candidate.slots_reported_used / (candidate.slots or 1), endpoint.granted)


def by_turn(endpoint: Endpoint) -> Rank:
    """Rank by the number of the last grant, so that turns also rotate within one moment."""
    return (endpoint.granted,)


_RANKS: Mapping[ChoicePolicy, Callable[[Endpoint], Rank]] = {ChoicePolicy.ROUND_ROBIN: by_turn}


def rank_for(policy: ChoicePolicy) -> Callable[[Endpoint], Rank]:
    """Return the rank that orders the free endpoints of a pool with this policy."""
    return _RANKS.get(policy, by_load)


class Selection(NamedTuple):
    """A free endpoint, the policy that chose it, and the compared times."""

    endpoint: Endpoint
    policy: str
    expected: Mapping[CandidateKey, FirstToken] = {}


class BestEndpoint(NamedTuple):
    """The endpoint with the lowest expected time to the first token for a request, free or not."""

    selection: Selection
    expected: FirstToken
    is_free: bool
    """Whether it takes the request now."""
    elsewhere_seconds: float
    """The time to the first token on the best endpoint that takes prompts now; infinity: none does."""

    @property
    def endpoint(self) -> Endpoint:
        """Return the endpoint."""
        return self.selection.endpoint

    def without_others(self) -> "BestEndpoint":
        """Return it without the times of the other endpoints, which a waiting request does not need."""
        return self._replace(selection=Selection(self.endpoint, self.selection.policy))

    @property
    def is_elsewhere(self) -> bool:
        """Whether another endpoint takes prompts now."""
        return self.elsewhere_seconds < inf

    @property
    def wait_seconds(self) -> float:
        """Return how long the request waits until the endpoint takes it."""
        return self.expected.line_seconds + self.expected.wait_seconds


class Ahead(NamedTuple):
    """What waits in the router's queue before a request."""

    tenant_seconds: Mapping[EngineKey, float] = {}
    """Prefill of the requests of its tenant and class, by the engine that they wait for."""
    other_tenants: int = 0
    """Number of the other tenants with waiting requests, which have turns of equal length."""
    first_at: CandidateKey | None = None
    """The endpoint for which it is the first in order."""

    def line_of(self, endpoint: Endpoint, now: float) -> Line:
        """Return what goes first at an endpoint."""
        engine = endpoint.engine_slots
        line, waiting = engine.line.seconds(now), engine.line.waiting_seconds
        if not waiting or endpoint.key == self.first_at:
            return Line(line)
        mine = self.tenant_seconds.get(engine.key, 0.0)
        return Line(line, mine, max(0.0, waiting - mine), self.other_tenants)


NOTHING_AHEAD = Ahead()


class SessionEndpoints:
    """The endpoint that last served each session of a pool; bounded, drops the least recently used one."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._homes: OrderedDict[tuple[str, bytes], CandidateKey] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def find(self, pool: str, key: bytes) -> CandidateKey | None:
        """Return the endpoint that last served the session; None: unknown."""
        return self._homes.get((pool, key))

    def note(self, pool: str, key: bytes, where: CandidateKey) -> None:
        """Record that an endpoint serves the session now."""
        homes, entry = self._homes, (pool, key)
        homes[entry] = where
        homes.move_to_end(entry)
        if len(homes) > self._max_entries:
            homes.popitem(last=False)


class Selector:
    """Selects endpoints, and remembers for all pools which ones served sessions and prompt prefixes."""

    def __init__(self, *, max_sessions: int, max_prefixes: int) -> None:
        self.sessions = SessionEndpoints(max_sessions)
        self.caches = PrefixCaches(max_prefixes)
        self.speeds = Speeds()
        self.further_turns = FurtherTurns()

    def choose(self, pool: Pool, pick: PickRequest, now: float) -> Selection | None:
        """Select a free endpoint, even if a busy one would be sooner; None: none is free for the request."""
        if pool.is_at_its_cap:
            return None
        policy = pool.settings.policy
        if policy is ChoicePolicy.FIRST_TOKEN and pick.prompt_tokens:
            best = self.best(pool, pick, now, None)
            return None if best is None else best.selection
        groups, session = pool.fitting(pick.needs), self._session(pool, pick)
        if session is not None and session.is_open:
            return Selection(session, SESSION_AFFINITY)
        is_random = policy is ChoicePolicy.RANDOM
        found = draw(groups, pick.excluded, pick.seed) if is_random else first_of(groups, pick.excluded)
        name = LEAST_LOADED if policy is ChoicePolicy.FIRST_TOKEN else policy.value
        return None if found is None else Selection(found, name)

    def _session(self, pool: Pool, pick: PickRequest) -> Endpoint | None:
        """Return the endpoint that last served the request's session, if it can serve the request."""
        where = self.sessions.find(pool.name, pick.affinity_key) if pick.affinity_key else None
        endpoint = None if where is None else pool.endpoints.get(where)
        if endpoint is None or where in pick.excluded or endpoint.group not in pool.fitting(pick.needs):
            return None
        return endpoint

    def note_taken(self, pool: Pool, pick: PickRequest, selection: Selection, now: float) -> None:
        """Record where a request is placed, so that the next one of its conversation goes there too."""
        endpoint = selection.endpoint
        if pick.affinity_key:
            self.sessions.note(pool.name, pick.affinity_key, endpoint.key)
        expected = selection.expected.get(endpoint.key)
        if expected is not None:
            self.further_turns.note(pool.name, pick.prefix_digests, now)
            self.caches.enter(pool.name, pick.prefix_digests, endpoint.candidate, expected.uncached_tokens)

    def _learn_holder(self, pool: Pool, pick: PickRequest, holder: PrefixHolder) -> None:
        """Learn from the dispatcher where a prompt is cached that an earlier router placed."""
        if (endpoint := pool.endpoints.get(holder[:3])) is None:
            return
        digests = pick.prefix_digests[: holder.digest_count]
        if not self.caches.knows(pool.name, digests[-1]):
            hits = self.caches.hits(pool.name, digests)
            tokens = tokens_of(digests) - hits.get(endpoint.key, NO_HIT).tokens
            self.caches.enter(pool.name, digests, endpoint.candidate, tokens)
            if pick.affinity_key and self.sessions.find(pool.name, pick.affinity_key) is None:
                self.sessions.note(pool.name, pick.affinity_key, endpoint.key)

    def best(self, pool: Pool, pick: PickRequest, now: float, ahead: Ahead | None) -> BestEndpoint | None:
        """Return the endpoint with the lowest expected time to the first token, or the session's; None: there is none.

        `ahead`: what waits before the request; None: only free endpoints are compared.
        """
        if pick.prefix_holder is not None:
            self._learn_holder(pool, pick, pick.prefix_holder)
        groups, session = pool.fitting(pick.needs), self._session(pool, pick)
        hits = self.caches.hits(pool.name, pick.prefix_digests) if pick.prefix_digests else {}
        moves = moves_of(hits) if hits else {}
        known = [*hits, session.key] if session is not None else [*hits]
        chosen: Endpoint | None = None
        least = elsewhere = inf
        expected: dict[CandidateKey, FirstToken] = {}
        delay = CROWD_WEIGHT * pool.prefilling_share**DELAY_EXPONENT
        turns = self.further_turns.expected(pool.name)
        for endpoint in _to_score(pool, groups, known, pick.excluded, only_open=ahead is None):
            engine = endpoint.engine_slots
            line = Line(engine.line.seconds(now)) if ahead is None else ahead.line_of(endpoint, now)
            busy = Busy(
                requests=max(engine.requests, endpoint.candidate.slots) if endpoint.runner_is_full else engine.requests,
                load=endpoint.engine_load,
                line=line,
            )
            speed, hit = self.speeds.of(endpoint.candidate, now), hits.get(endpoint.key, NO_HIT)
            move = moves.get(endpoint.candidate.state_kind)
            if move is not None and move.source == endpoint.key:
                move = None
            time = first_token(endpoint.candidate, busy, speed, pick.prompt_tokens, hit, move)
            own_seconds = time.own_seconds
            expected[endpoint.key] = time
            seconds = time.seconds + delay * own_seconds + turns * engine.line.usual_seconds(now)
            if endpoint.takes_prompt(now):
                elsewhere = min(elsewhere, time.seconds)
            if chosen is None or seconds < least or (seconds == least and _precedes(endpoint, chosen)):
                chosen, least = endpoint, seconds
        if chosen is None:
            return None
        name = ChoicePolicy.FIRST_TOKEN.value
        if session is not None and session.key in expected:
            soonest = expected[chosen.key].seconds
            lost = expected[session.key].seconds - soonest
            if lost <= max(SESSION_GATE_SECONDS, SESSION_GATE_SHARE * soonest):
                chosen, name = session, SESSION_AFFINITY
        time = expected[chosen.key]
        is_first = time.line_seconds <= chosen.engine_slots.line.seconds(now)
        is_free = ahead is None or (is_first and chosen.takes_prompt(now))
        return BestEndpoint(Selection(chosen, name, expected), time, is_free, elsewhere)


def _to_score(
    pool: Pool,
    groups: Sequence[EndpointGroup],
    known: Sequence[CandidateKey],
    excluded: Collection[CandidateKey],
    *,
    only_open: bool,
) -> Iterable[Endpoint]:
    """Yield the endpoints to compare: all, or of many the known and the least loaded ones."""
    if not only_open and len(pool.endpoints) <= MAX_SCORED:
        return [
            endpoint
            for group in groups
            for endpoint in group.endpoints.values()
            if endpoint.may_be_awaited and endpoint.key not in excluded
        ]
    if len(groups) == 1 and not excluded and len(groups[0].open) <= MAX_SCORED:
        return groups[0].open
    if sum(len(group.open) for group in groups) <= MAX_SCORED:
        return (endpoint for group in groups for endpoint in group.open if endpoint.key not in excluded)
    found = {
        key: endpoint
        for key in known
        if (endpoint := pool.endpoints.get(key)) is not None
        and (endpoint.is_open if only_open else endpoint.may_be_awaited)
        and endpoint.group in groups
        and key not in excluded
    }
    for group in groups:
        found |= {each.key: each for each in group.some_of_the_best(MAX_SCORED_OF_MANY) if each.key not in excluded}
    if not found and (first := first_of(groups, excluded)) is not None:
        found[first.key] = first
    return found.values()


def _precedes(one: Endpoint, other: Endpoint) -> bool:
    return (by_load(one), one.key) < (by_load(other), other.key)


def choose_ejected(pool: Pool, pick: PickRequest) -> Selection | None:
    """Return the least loaded endpoint that is only unavailable because it is ejected, as a last resort."""
    if pool.is_at_its_cap:
        return None
    spare = pool.spare_endpoints(pick)
    if not spare:
        return None
    return Selection(min(spare, key=lambda endpoint: (by_load(endpoint), endpoint.key)), LEAST_LOADED)


def mix(number: int) -> int:
    """Return 64 pseudo-random bits of an integer of any size.

    The finalizer of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    mixed = (number + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def first_of(groups: Sequence[EndpointGroup], excluded: Collection[CandidateKey]) -> Endpoint | None:
    """Return the open endpoint with the lowest rank of several groups of a pool; None: none is open."""
    if len(groups) == 1:
        return groups[0].first(excluded)
    firsts = [endpoint for group in groups if (endpoint := group.first(excluded)) is not None]
    return min(firsts, key=_order, default=None)


def draw(groups: Sequence[EndpointGroup], excluded: Collection[CandidateKey], seed: int) -> Endpoint | None:
    """Return a random open endpoint that is not excluded; equal seeds and groups give the same one."""
    count = sum(len(group.open) for group in groups)
    if not count:
        return None
    number = seed
    for _ in range(MAX_DRAWS):
        number = mix(number)
        endpoint = _at(groups, number % count)
        if endpoint.key not in excluded:
            return endpoint
    begin = number % count
    following = (_at(groups, (begin + step) % count) for step in range(min(count, len(excluded) + 1)))
    return next((endpoint for endpoint in following if endpoint.key not in excluded), None)


def _at(groups: Sequence[EndpointGroup], index: int) -> Endpoint:
    for group in groups:
        if index < len(group.open):
            return group.open[index]
        index -= len(group.open)
    raise IndexError(index)
