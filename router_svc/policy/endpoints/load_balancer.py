"""Load balancing: which free endpoint of a pool a request gets, by policy.

- first_token: the endpoint with the lowest expected time to the first token (`first_token.py`), or the session's last
  endpoint unless another is clearly sooner; least_loaded for requests without a prompt;
- least_loaded: the endpoint with the lowest share of slots in use, engine figures included;
- round_robin: the least recently granted endpoint;
- random: any free endpoint with equal probability.

The last three send a request with a session to its last endpoint if that is free.

A new policy is a rank of the free endpoints (like `by_turn`) or a function that picks one of them (like `draw`).
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from router_svc.policy.endpoints.candidates import CandidateKey
from router_svc.policy.endpoints.choice import PickRequest
from router_svc.policy.endpoints.first_token import Busy, FirstToken, Speeds, first_token
from router_svc.policy.endpoints.pool import Endpoint, EndpointGroup, Pool, Rank
from router_svc.policy.endpoints.prefix_affinity import NO_HIT, PrefixCaches, moves_of, tokens_of
from router_svc.policy.settings import ChoicePolicy
from weft.kernel.placement_request import PrefixHolder

LEAST_LOADED, SESSION_AFFINITY = "least_loaded", "session_affinity"
"""Names of choices in decisions, logs and explanations, in addition to the policies' names."""
MAX_SCORED = 64
"""Maximum free endpoints that are scored; if there are more, those with a cached prefix and the least loaded."""
MAX_SCORED_OF_MANY = 16
SESSION_GATE_SECONDS = 1.0
SESSION_GATE_SHARE = 0.25
"""A session moves only if another endpoint is sooner by more than both: its later turns need the cache."""
DELAY_EXPONENT = 3
"""A prompt also delays those after it, so its own prefill counts once more times the share of the pool's endpoints
that process prompts, to this power. Of 0, 1, 2, 3 and constant shares, 3 came closest to a router that sees all caches
and queues, over idle, loaded and full pools (`python -m bench.routing`)."""
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


class SessionEndpoints:
    """The endpoint that last served each session of a pool; bounded, drops the least recently used one."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._places: OrderedDict[tuple[str, bytes], CandidateKey] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def find(self, pool: str, key: bytes) -> CandidateKey | None:
        """Return the endpoint that last served the session; None: unknown."""
        return self._places.get((pool, key))

    def note(self, pool: str, key: bytes, where: CandidateKey) -> None:
        """Record that an endpoint serves the session now."""
        places, entry = self._places, (pool, key)
        places[entry] = where
        places.move_to_end(entry)
        if len(places) > self._max_entries:
            places.popitem(last=False)


class Selector:
    """Selects endpoints, and remembers for all pools which ones served sessions and prompt prefixes."""

    def __init__(self, *, max_sessions: int, max_prefixes: int) -> None:
        self.sessions = SessionEndpoints(max_sessions)
        self.caches = PrefixCaches(max_prefixes)
        self.speeds = Speeds()

    def choose(self, pool: Pool, pick: PickRequest, now: float) -> Selection | None:
        """Select a free endpoint; None: none is free for the request.

        The selection is recorded as taken, so that the next request of the session goes there too.
        """
        if pool.is_at_its_cap:
            return None
        groups = pool.fitting(pick.needs)
        if pick.prefix_holder is not None:
            self._learn_holder(pool, pick, pick.prefix_holder)
        session = None
        if pick.affinity_key and (where := self.sessions.find(pool.name, pick.affinity_key)) is not None:
            session = pool.open_endpoint(where, groups, pick.excluded)
        policy = pool.settings.policy
        if policy is ChoicePolicy.FIRST_TOKEN and pick.prompt_tokens:
            chosen = self._soonest(pool, groups, pick, session, now)
        elif session is not None:
            chosen = Selection(session, SESSION_AFFINITY)
        else:
            is_random = policy is ChoicePolicy.RANDOM
            found = draw(groups, pick.excluded, pick.seed) if is_random else first_of(groups, pick.excluded)
            name = LEAST_LOADED if policy is ChoicePolicy.FIRST_TOKEN else policy.value
            chosen = None if found is None else Selection(found, name)
        if chosen is not None and pick.affinity_key:
            self.sessions.note(pool.name, pick.affinity_key, chosen.endpoint.key)
        return chosen

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

    def lost_tokens(self, pool: Pool, pick: PickRequest) -> int:
        """Return the prompt tokens that a busy endpoint has cached but no free one has."""
        if pool.settings.policy is not ChoicePolicy.FIRST_TOKEN or not pick.prefix_digests:
            return 0
        groups = pool.fitting(pick.needs)
        free = most = 0
        for key, hit in self.caches.hits(pool.name, pick.prefix_digests).items():
            endpoint = pool.endpoints.get(key)
            if endpoint is not None and endpoint.is_usable and endpoint.group in groups:
                most = max(most, hit.tokens)
                if endpoint.is_open:
                    free = max(free, hit.tokens)
        return most - free

    def _soonest(
        self, pool: Pool, groups: Sequence[EndpointGroup], pick: PickRequest, session: Endpoint | None, now: float
    ) -> Selection | None:
        """Return the endpoint with the lowest expected time to the first token, or the session's."""
        hits = self.caches.hits(pool.name, pick.prefix_digests) if pick.prefix_digests else {}
        moves = moves_of(hits) if hits else {}
        known = [*hits, session.key] if session is not None else [*hits]
        chosen: Endpoint | None = None
        least = 0.0
        expected: dict[CandidateKey, FirstToken] = {}
        delay = pool.prefilling_share**DELAY_EXPONENT
        for endpoint in _to_score(pool, groups, known, pick.excluded):
            busy = Busy(
                requests=endpoint.engine_slots.requests,
                owed_tokens=endpoint.engine_slots.owed_tokens,
                load=endpoint.engine_load,
            )
            speed, hit = self.speeds.of(endpoint.candidate, now), hits.get(endpoint.key, NO_HIT)
            move = moves.get(endpoint.candidate.state_kind)
            if move is not None and move.source == endpoint.key:
                move = None
            time = first_token(endpoint.candidate, busy, speed, pick.prompt_tokens, hit, move)
            expected[endpoint.key] = time
            seconds = time.seconds + delay * time.own_seconds
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
        self.caches.enter(pool.name, pick.prefix_digests, chosen.candidate, expected[chosen.key].uncached_tokens)
        return Selection(chosen, name, expected)


def _to_score(
    pool: Pool, groups: Sequence[EndpointGroup], known: Sequence[CandidateKey], excluded: Collection[CandidateKey]
) -> Iterable[Endpoint]:
    """Yield the free endpoints to compare: all, or of many the known and the least loaded ones."""
    if len(groups) == 1 and not excluded and len(groups[0].open) <= MAX_SCORED:
        return groups[0].open
    if sum(len(group.open) for group in groups) <= MAX_SCORED:
        return (endpoint for group in groups for endpoint in group.open if endpoint.key not in excluded)
    found = {key: endpoint for key in known if (endpoint := pool.open_endpoint(key, groups, excluded)) is not None}
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
