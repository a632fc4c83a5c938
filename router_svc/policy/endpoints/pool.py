"""The endpoints of a pool: candidates with their load and health, grouped by what they can serve.

- `Endpoint`: a candidate with everything about it that changes between requests.
- `EndpointGroup`: the endpoints of a pool that can serve the same requests, ordered by the selection policy.
- `Pool`: all endpoints of a pool and its concurrency cap.

`load_balancer.py` decides which free endpoint a request gets.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf

from router_svc.policy.endpoints.candidates import Candidate, CandidateKey, EngineKey, Needs, Readiness, RunnerKey
from router_svc.policy.endpoints.choice import Considered, PickRequest
from router_svc.policy.endpoints.circuit_breaker import EndpointHealth, HealthState
from router_svc.policy.endpoints.engine_load import NO_ENGINE_LOAD, EngineFigures
from router_svc.policy.endpoints.prompt_line import OPEN_LINE_SECONDS, OPENING_MARGIN_SECONDS, PromptLine
from router_svc.policy.endpoints.required_capabilities import Profile, fits, profile_of
from router_svc.policy.pool_settings import PoolSettings

MAX_STALE_SHARE = 2
"""The heap of a group is rebuilt if it has more entries than this times the open endpoints ..."""
MIN_STALE_ENTRIES = 64
"""... plus this many."""
MAX_SAMPLED_PER_SHOWN = 1
"""Members examined for each one that is shown."""
MAX_REMEMBERED_NEEDS = 1_024
"""Distinct needs for which the matching groups are cached."""
NEVER_GRANTED = -1
# Endpoints are settled twice per request, and looking up an Enum member would take longer than the rest of it.
_READY, _WORKS, _ON_TRIAL = Readiness.READY, HealthState.WORKS, HealthState.ON_TRIAL

Rank = tuple[float, ...]
"""Sort key of the free endpoints in a group; the lowest is selected first."""


class RunnerLoad:
    """Number of requests on a runner incarnation over all its models."""

    __slots__ = ("endpoints", "key", "limits", "requests")

    def __init__(self, key: RunnerKey) -> None:
        self.key = key
        self.requests = 0
        self.endpoints: dict[CandidateKey, Endpoint] = {}
        self.limits: Counter[int] = Counter()
        """Request limits of the runner's candidates, with the number of candidates that have each."""

    def change_limit(self, was: int, becomes: int) -> None:
        """Replace the limit of a candidate; 0: no limit, or no such candidate."""
        if was:
            self.limits[was] -= 1
            if not self.limits[was]:
                del self.limits[was]
        if becomes:
            self.limits[becomes] += 1


class EngineSlots:
    """Number of requests on an engine, whose slots its model and that model's adapters share."""

    __slots__ = ("endpoints", "granted", "inherited", "key", "line", "owed_tokens", "requests")

    def __init__(self, key: EngineKey) -> None:
        self.key = key
        self.line = PromptLine()
        self.requests = 0
        self.granted = 0
        """Requests that this router has granted it since it appeared."""
        self.inherited = 0
        """Requests that this router has not granted, by its runner's reports: those of an earlier process
        of this router, of another router, or of direct callers of the runner."""
        self.owed_tokens = 0.0
        """Prompt tokens of its requests without a first token."""
        self.endpoints: dict[CandidateKey, Endpoint] = {}

    def note_used(self, slots: int) -> bool:
        """Note how many slots its runner reports in use. Returns whether that changes `inherited`.

        Reports are seconds old. A used slot is inherited or belongs to a granted request. So at least the slots above
        all grants ever are inherited; beyond that no more than before, and no more than exceed the current grants.
        """
        was = self.inherited
        self.inherited = max(slots - self.granted, min(was, slots - self.requests), 0)
        return self.inherited != was


class Endpoint:
    """A candidate in its pool, with its load and health. Only the pool and the candidate index change it."""

    __slots__ = (
        "awaited_end",
        "candidate",
        "considered",
        "engine",
        "engine_load",
        "engine_slots",
        "entry",
        "granted",
        "group",
        "health",
        "held_for",
        "in_flight",
        "is_open",
        "is_spare",
        "is_usable",
        "key",
        "open_index",
        "owed_tokens",
        "pool",
        "rank",
        "runner",
        "trying",
    )

    def __init__(
        self, candidate: Candidate, pool: "Pool", engine_slots: EngineSlots, runner: RunnerLoad, health: EndpointHealth
    ) -> None:
        self.candidate = candidate
        self.key: CandidateKey = candidate.key
        self.engine_slots = engine_slots
        self.runner = runner
        self.health = health
        self.pool = pool
        """The pool that counts its requests, even after it left that pool."""
        self.group: EndpointGroup | None = None
        """None: its candidate left the mesh while requests still run on it."""
        self.in_flight = 0
        self.owed_tokens = 0.0
        """Its part of the engine's owed tokens."""
        self.engine: EngineFigures | None = None
        """The last received figures of its engine, even if they no longer count."""
        self.engine_load = NO_ENGINE_LOAD
        """What these figures mean for its load while they count."""
        self.granted = NEVER_GRANTED
        """Number of its last grant; grants of all endpoints share one sequence."""
        self.held_for: str | None = None
        """The model to be loaded in its place, empty if unknown; None: it is not held."""
        self.trying = False
        """Whether a trial request runs on it. The end of any request allows the next trial, since the trial
        request is not recorded."""
        self.awaited_end: float | None = None
        """End of its pause or ejection as scheduled in `PauseEnds`."""
        self.is_open = False
        self.is_spare = False
        """Whether it takes none only because it is ejected."""
        self.is_usable = False
        """Whether it takes requests at all: ready, not held and healthy."""
        self.rank: Rank = ()
        self.entry = 0
        """Number of its valid heap entry in its group; 0: none."""
        self.considered: tuple[int, Considered] | None = None
        """Cached description for decisions, with its position in a route; None: stale."""
        self.open_index = 0
        """Index in its group's list of open endpoints."""

    @property
    def is_full(self) -> bool:
        """Whether all slots of its engine are granted or inherited."""
        slots = self.engine_slots
        return slots.requests + slots.inherited >= self.candidate.slots

    @property
    def runner_is_full(self) -> bool:
        """Whether its runner is at its request limit over all models."""
        return 0 < self.candidate.runner_max_requests <= self.runner.requests

    @property
    def share(self) -> float:
        """Share of its slots in use, by grants and engine figures; it can exceed 1."""
        granted, slots = self.engine_slots.requests, self.candidate.slots
        if self.engine_load is NO_ENGINE_LOAD:
            return granted / (slots or 1)
        return self.engine_load.used_share(granted, slots)

    @property
    def may_be_awaited(self) -> bool:
        """Whether it takes requests now, or once it has a free slot."""
        return self.is_open or (self.is_usable and not self.health.paused)

    def takes_prompt(self, now: float) -> bool:
        """Whether it is open and soon done with its prompts."""
        return self.is_open and self.engine_slots.line.ends_at < now + OPEN_LINE_SECONDS

    def settle(self) -> None:
        """Recompute which requests it is open for, after any change."""
        self.considered = None
        candidate, slots, runner = self.candidate, self.engine_slots, self.runner
        takes = candidate.readiness is _READY and self.held_for is None
        state = self.health.state
        self.is_usable = is_usable = takes and state is _WORKS
        # `is_full` and `runner_is_full`, without their calls.
        is_full = slots.requests + slots.inherited >= candidate.slots
        runner_is_full = 0 < candidate.runner_max_requests <= runner.requests
        has_room = takes and not (is_full or self.health.paused or runner_is_full)
        self.is_open = is_open = has_room and (is_usable or (state is _ON_TRIAL and not self.trying))
        self.is_spare = has_room and not is_open


_Entry = tuple[Rank, CandidateKey, int, Endpoint]


class EndpointGroup:
    """Endpoints of a pool with equal profiles: a list of the open ones, and a heap of them with lazy invalidation."""

    def __init__(self, profile: Profile, rank: Callable[[Endpoint], Rank]) -> None:
        self.profile = profile
        self.open: list[Endpoint] = []
        self.spare: dict[CandidateKey, Endpoint] = {}
        self.endpoints: dict[CandidateKey, Endpoint] = {}
        self.usable = 0
        self._rank = rank
        self._heap: list[_Entry] = []
        self._entries = 0
        """Entries ever pushed to the heap."""

    def put(self, endpoint: Endpoint) -> bool:
        """Reorder a changed endpoint. Returns whether the change made it free."""
        was_usable, was_open, was_free = endpoint.is_usable, endpoint.is_open, endpoint.is_open or endpoint.is_spare
        endpoint.settle()
        if (was_usable or was_open) and not endpoint.may_be_awaited:
            endpoint.pool.losses += 1
        self.usable += endpoint.is_usable - was_usable
        if was_open and not endpoint.is_open:
            self._close(endpoint)
        elif endpoint.is_open:
            self._order(endpoint, is_new=not was_open)
        if endpoint.is_spare:
            self.spare[endpoint.key] = endpoint
        elif self.spare:
            self.spare.pop(endpoint.key, None)
        return not was_free and (endpoint.is_open or endpoint.is_spare)

    def add(self, endpoint: Endpoint) -> None:
        """Add an endpoint to this group."""
        self.endpoints[endpoint.key] = endpoint
        endpoint.group = self
        self.put(endpoint)

    def remove(self, endpoint: Endpoint) -> None:
        """Remove an endpoint from this group; it becomes neither open nor usable."""
        if endpoint.is_open:
            self._close(endpoint)
        self.usable -= endpoint.is_usable
        self.spare.pop(endpoint.key, None)
        del self.endpoints[endpoint.key]
        endpoint.is_open = endpoint.is_spare = endpoint.is_usable = False
        endpoint.group = None
        endpoint.pool.losses += 1

    def first(self, excluded: Collection[CandidateKey]) -> Endpoint | None:
        """Return the open endpoint with the lowest rank that is not excluded; None: there is none."""
        heap = self._heap
        aside: list[_Entry] = []
        found = None
        while heap:
            _, key, number, endpoint = heap[0]
            # Entries are numbered per group, so an endpoint that moved may have the same number in its new group.
            if endpoint.entry != number or endpoint.group is not self:
                heappop(heap)
            elif key in excluded:
                aside.append(heappop(heap))
            else:
                found = endpoint
                break
        for entry in aside:
            heappush(heap, entry)
        return found

    def some_of_the_best(self, most: int) -> list[Endpoint]:
        """Return some open endpoints of low rank, including the lowest; unordered."""
        return [
            endpoint
            for _, _, number, endpoint in self._heap[:most]
            if endpoint.entry == number and endpoint.group is self
        ]

    def _order(self, endpoint: Endpoint, *, is_new: bool) -> None:
        rank = self._rank(endpoint)
        if is_new:
            endpoint.open_index = len(self.open)
            self.open.append(endpoint)
        elif rank == endpoint.rank:
            return
        self._entries += 1
        endpoint.rank, endpoint.entry = rank, self._entries
        heappush(self._heap, (rank, endpoint.key, endpoint.entry, endpoint))
        if len(self._heap) > MAX_STALE_SHARE * len(self.open) + MIN_STALE_ENTRIES:
            self._heap = [(each.rank, each.key, each.entry, each) for each in self.open]
            heapify(self._heap)

    def _close(self, endpoint: Endpoint) -> None:
        last = self.open.pop()
        if last is not endpoint:
            self.open[endpoint.open_index] = last
            last.open_index = endpoint.open_index
        endpoint.entry = 0


class Pool:
    """The endpoints of a pool. It exists while it has members, or requests of earlier members run."""

    def __init__(self, name: str, settings: PoolSettings, rank: Callable[[Endpoint], Rank]) -> None:
        self.name = name
        self.settings = settings
        self.endpoints: dict[CandidateKey, Endpoint] = {}
        self.in_flight = 0
        """Requests on current and earlier members."""
        self.prefilling = 0
        """Current and earlier members with prompts without a first token."""
        self.losses = 0
        """How often a member came to take no more requests, so that none may wait for it."""
        self.breaks_in_a_row = 0
        """Requests that broke on its members since the last success."""
        self._rank = rank
        self._groups: dict[Profile, EndpointGroup] = {}
        self._fitting: dict[Needs, tuple[EndpointGroup, ...]] = {}

    @property
    def is_at_its_cap(self) -> bool:
        """Whether the pool has reached `max_in_flight`."""
        return 0 < self.settings.max_in_flight <= self.in_flight

    @property
    def prefilling_share(self) -> float:
        """Share of the members that process prompts."""
        return min(1.0, self.prefilling / (len(self.endpoints) or 1))

    @property
    def has_spare(self) -> bool:
        """Whether some members take no requests only because they are ejected."""
        return any(group.spare for group in self._groups.values())

    @property
    def has_free(self) -> bool:
        """Whether some member may be free, at least for some needs."""
        if 0 < self.settings.max_in_flight <= self.in_flight:
            return False
        # Not any(), as this runs several times per request.
        for group in self._groups.values():  # noqa: SIM110
            if group.open or group.spare:
                return True
        return False

    def takes_prompts(self, now: float) -> bool:
        """Whether some free member is soon done with its prompts."""
        for group in self._groups.values():
            for endpoint in (*group.open, *group.spare.values()) if group.spare else group.open:
                if endpoint.engine_slots.line.ends_at < now + OPEN_LINE_SECONDS:
                    return True
        return False

    def taking_prompts(self, now: float) -> list["Endpoint"]:
        """Return the open members that are soon done with their prompts."""
        return [each for group in self._groups.values() for each in group.open if each.takes_prompt(now)]

    def opens_at(self, now: float) -> float:
        """Return when the next free member that requests may want is soon done with its prompts; infinity: none.

        While some member takes prompts, each request wants a certain one; otherwise some may not have been compared.
        """
        first, any_wanted = inf, not self.takes_prompts(now)
        for group in self._groups.values():
            for endpoint in group.open:
                line = endpoint.engine_slots.line
                # Later than rounding may be wrong, as no other timer would ask before the next tick.
                at = line.ends_at - OPEN_LINE_SECONDS + OPENING_MARGIN_SECONDS
                if now < at < first and (any_wanted or line.waiting_seconds):
                    first = at
        return first

    # -- membership

    def add(self, endpoint: Endpoint) -> None:
        """Add a member."""
        self.endpoints[endpoint.key] = endpoint
        self._group_for(endpoint).add(endpoint)

    def remove(self, endpoint: Endpoint) -> None:
        """Remove a member; its running requests count here until they end."""
        self._remove_from_group(endpoint)
        del self.endpoints[endpoint.key]

    def change(self, endpoint: Endpoint, candidate: Candidate) -> None:
        """Replace the candidate of a member."""
        was = endpoint.candidate
        endpoint.candidate = candidate
        assert endpoint.group is not None, "every endpoint of a pool is in a group"
        if _same_profile(was, candidate):
            endpoint.group.put(endpoint)
        else:
            self._remove_from_group(endpoint)
            self._group_for(endpoint).add(endpoint)

    # -- which members can serve a request

    def fitting(self, needs: Needs) -> tuple[EndpointGroup, ...]:
        """Return the groups that can serve such requests."""
        found = self._fitting.get(needs)
        if found is None:
            if len(self._fitting) >= MAX_REMEMBERED_NEEDS:
                self._fitting.clear()
            found = tuple(group for profile, group in self._groups.items() if not fits(profile, needs))
            self._fitting[needs] = found
        return found

    def spare_endpoints(self, pick: PickRequest) -> list[Endpoint]:
        """Return the endpoints that could take a request if they were not ejected."""
        return [
            endpoint
            for group in self.fitting(pick.needs)
            for endpoint in group.spare.values()
            if endpoint.key not in pick.excluded
        ]

    def has_usable(self, pick: PickRequest) -> bool:
        """Whether a healthy member takes such requests, now or once it has a free slot."""
        groups = self.fitting(pick.needs)
        usable = sum(group.usable for group in groups)
        if not usable or not pick.excluded:
            return usable > 0
        known = (self.endpoints.get(key) for key in pick.excluded)
        return usable > sum(
            endpoint is not None and endpoint.is_usable and endpoint.group in groups for endpoint in known
        )

    def permitted(self, needs: Needs, excluded: Collection[CandidateKey]) -> Iterator[Endpoint]:
        """Yield the members that meet the needs and are neither excluded nor down."""
        for group in self.fitting(needs):
            for endpoint in group.endpoints.values():
                if endpoint.key not in excluded and endpoint.candidate.readiness is not Readiness.DOWN:
                    yield endpoint

    def open_endpoint(
        self, key: CandidateKey, groups: Sequence[EndpointGroup], excluded: Collection[CandidateKey]
    ) -> Endpoint | None:
        """Return a member if it is free for a request."""
        endpoint = self.endpoints.get(key)
        return (
            endpoint
            if endpoint is not None and endpoint.is_open and endpoint.group in groups and key not in excluded
            else None
        )

    def some_endpoints(self, groups: Sequence[EndpointGroup], most: int) -> Iterable[Endpoint]:
        """Return all members if there are few, else the best ranked of `groups`, filled up with others.

        `groups`: the groups that can serve the request.
        """
        if len(self.endpoints) <= most:
            return self.endpoints.values()
        some = [endpoint for group in groups for endpoint in group.some_of_the_best(most)]
        if len(some) >= most:
            return some
        return dict.fromkeys((*some, *islice(self.endpoints.values(), MAX_SAMPLED_PER_SHOWN * most)))

    def _group_for(self, endpoint: Endpoint) -> EndpointGroup:
        profile = profile_of(endpoint.candidate)
        group = self._groups.get(profile)
        if group is None:
            group = self._groups[profile] = EndpointGroup(profile, self._rank)
            self._fitting.clear()
        return group

    def _remove_from_group(self, endpoint: Endpoint) -> None:
        group = endpoint.group
        assert group is not None, "every endpoint of a pool is in a group"
        group.remove(endpoint)
        if not group.endpoints:
            del self._groups[group.profile]
            self._fitting.clear()


def _same_profile(one: Candidate, other: Candidate) -> bool:
    return (
        one.operations == other.operations
        and one.remote == other.remote
        and one.skills == other.skills
        and one.thinking_modes == other.thinking_modes
        and one.tools == other.tools
        and one.labels == other.labels
        and one.context_tokens == other.context_tokens
    )
