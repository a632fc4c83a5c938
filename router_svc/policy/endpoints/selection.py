"""Selection policies: which free endpoint of a pool a request gets.

Session affinity comes first, whatever the policy of the pool. Then the pool's policy decides:

- least_loaded: the endpoint with the lowest share of its slots in use, with what its engine's figures add;
- round_robin: the endpoint that was granted longest ago;
- random: any free endpoint, each equally likely;
- prefix_affinity: the endpoint that probably has the beginning of the prompt in its cache, unless it has more than its
  share of the load; else least_loaded.

A new policy is a rank of the free endpoints (as `by_turn`) or a function that picks one of them (as `draw`).
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter

from router_svc.policy.endpoints.candidates import CandidateKey
from router_svc.policy.endpoints.choice import PickRequest
from router_svc.policy.endpoints.hash_ring import hash_bytes, mix
from router_svc.policy.endpoints.pool import Endpoint, EndpointGroup, Pool, Rank
from router_svc.policy.settings import ChoicePolicy

LEAST_LOADED, RANDOM, ROUND_ROBIN = "least_loaded", "random", "round_robin"
PREFIX_AFFINITY, SESSION_AFFINITY = "prefix_affinity", "session_affinity"
"""Names of the policies in decisions, logs and explanations."""
MAX_DIGESTS = 32
"""Beginnings of one prompt that are looked up, the shortest ones first: the others are only longer."""
MAX_DRAWS = 8
"""Random draws that may hit excluded endpoints before the next endpoint that is not excluded is taken."""
_order = attrgetter("rank", "key")


def by_load(endpoint: Endpoint) -> Rank:
    """Rank by the share of slots in use, then by the load that the runner reports, then by the oldest grant.

    The share is that of the slots granted, corrected by the engine's figures. A router that has just started knows of
    no grants.
    """
    candidate = endpoint.candidate
    return (endpoint.share, candidate.slots_reported_used / (candidate.slots or 1), endpoint.granted)


def by_turn(endpoint: Endpoint) -> Rank:
    """Rank by the number of the last grant, so that turns rotate within one moment too."""
    return (endpoint.granted,)


_RANKS: Mapping[ChoicePolicy, Callable[[Endpoint], Rank]] = {ChoicePolicy.ROUND_ROBIN: by_turn}
_NAMES = {
    ChoicePolicy.LEAST_LOADED: LEAST_LOADED,
    ChoicePolicy.RANDOM: RANDOM,
    ChoicePolicy.ROUND_ROBIN: ROUND_ROBIN,
    ChoicePolicy.PREFIX_AFFINITY: LEAST_LOADED,
}
"""Name of a choice that no affinity made."""


def rank_for(policy: ChoicePolicy) -> Callable[[Endpoint], Rank]:
    """Return the rank that orders the free endpoints of a pool with this policy."""
    return _RANKS.get(policy, by_load)


def policy_name(pool: Pool) -> str:
    """Return the name of a choice in this pool that no affinity made."""
    return _NAMES[pool.settings.policy]


class RecentEndpoints:
    """Bounded table of the endpoint that last served each key of a pool; evicts the least recently used key."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._places: OrderedDict[tuple[str, int | bytes], CandidateKey] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def find(self, pool: str, key: int | bytes) -> CandidateKey | None:
        """Return the endpoint that last served the key; None: unknown."""
        return self._places.get((pool, key))

    def note(self, pool: str, key: int | bytes, where: CandidateKey) -> None:
        """Record that an endpoint serves the key now."""
        places, entry = self._places, (pool, key)
        places[entry] = where
        places.move_to_end(entry)
        if len(places) > self._max_entries:
            places.popitem(last=False)


class Selector:
    """Selects endpoints, and remembers over all pools which ones served sessions and prompt prefixes."""

    def __init__(self, *, max_sessions: int, max_prefixes: int) -> None:
        self.sessions = RecentEndpoints(max_sessions)
        self.prefixes = RecentEndpoints(max_prefixes)

    def choose(self, pool: Pool, pick: PickRequest) -> tuple[Endpoint, str] | None:
        """Return a free endpoint and the name of the policy that chose it; None: none is free for the request.

        The choice is recorded as if it was taken, so that the next request of the session goes there too.
        """
        if pool.is_at_its_cap:
            return None
        groups = pool.fitting(pick.needs)
        chosen = self._by_session(pool, groups, pick) if pick.affinity_key else None
        if chosen is None:
            chosen = self._by_policy(pool, groups, pick)
        if chosen is not None:
            self._remember(pool, chosen[0], pick)
        return chosen

    def _by_session(
        self, pool: Pool, groups: Sequence[EndpointGroup], pick: PickRequest
    ) -> tuple[Endpoint, str] | None:
        """Return the endpoint that last served the session if it is free, else the owner of the session on the ring.

        A request does not wait for a cache.
        """
        where = self.sessions.find(pool.name, pick.affinity_key)
        endpoint = None if where is None else pool.open_endpoint(where, groups, pick.excluded)
        endpoint = endpoint or pool.owner_on_ring(hash_bytes(pick.affinity_key), groups, pick.excluded)
        return None if endpoint is None else (endpoint, SESSION_AFFINITY)

    def _by_policy(self, pool: Pool, groups: Sequence[EndpointGroup], pick: PickRequest) -> tuple[Endpoint, str] | None:
        policy = pool.settings.policy
        if policy is ChoicePolicy.PREFIX_AFFINITY:
            endpoint = self._by_prefix(pool, groups, pick)
            if endpoint is not None:
                return endpoint, PREFIX_AFFINITY
        if policy is ChoicePolicy.RANDOM:
            endpoint = draw(groups, pick.excluded, pick.seed)
        else:
            endpoint = first_of(groups, pick.excluded)
        return None if endpoint is None else (endpoint, _NAMES[policy])

    def _by_prefix(self, pool: Pool, groups: Sequence[EndpointGroup], pick: PickRequest) -> Endpoint | None:
        """Return the endpoint that last served the longest known prefix, else the ring owner of the shortest one.

        The shortest one, since it is what related prompts share, and every router finds the same owner.
        """
        digests = pick.prefix_digests[:MAX_DIGESTS]
        for digest in reversed(digests):
            where = self.prefixes.find(pool.name, digest)
            endpoint = None if where is None else pool.open_endpoint(where, groups, pick.excluded)
            if endpoint is not None and pool.bears_more(endpoint):
                return endpoint
        return pool.owner_on_ring(digests[0], groups, pick.excluded) if digests else None

    def _remember(self, pool: Pool, endpoint: Endpoint, pick: PickRequest) -> None:
        if pick.affinity_key:
            self.sessions.note(pool.name, pick.affinity_key, endpoint.key)
        if pool.settings.policy is ChoicePolicy.PREFIX_AFFINITY:
            for digest in pick.prefix_digests[:MAX_DIGESTS]:
                self.prefixes.note(pool.name, digest, endpoint.key)


def choose_ejected(pool: Pool, pick: PickRequest) -> tuple[Endpoint, str] | None:
    """Return the least loaded endpoint that only its ejection keeps from the request, for when no other works."""
    if pool.is_at_its_cap:
        return None
    spare = pool.spare_endpoints(pick)
    if not spare:
        return None
    return min(spare, key=lambda endpoint: (by_load(endpoint), endpoint.key)), LEAST_LOADED


def first_of(groups: Sequence[EndpointGroup], excluded: Collection[CandidateKey]) -> Endpoint | None:
    """Return the open endpoint of the lowest rank over several groups of one pool; None: there is none."""
    if len(groups) == 1:
        return groups[0].first(excluded)
    firsts = [endpoint for group in groups if (endpoint := group.first(excluded)) is not None]
    return min(firsts, key=_order, default=None)


def draw(groups: Sequence[EndpointGroup], excluded: Collection[CandidateKey], seed: int) -> Endpoint | None:
    """Return a random open endpoint that is not excluded; the same seed draws the same one from the same groups."""
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
