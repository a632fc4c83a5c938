"""The load planner: which sleeping models are loaded, and which models are evicted for them.

A load that fits beside all loaded models begins immediately. If models must be evicted, it begins

- when the waiting requests are worth the cost of the swap (see swap_cost),
- or when the tenants of the loaded models exceed their share by a quantum that grows with the cost,
- and at the latest `max_cold_wait_seconds` after the oldest request of its queue arrived or its model was unloaded,
  whichever is later. Queues that reach this bound are due, and served in the order in which they became due.

Durable requests have separate demands. They get free memory, or models that no caller has used for a while, take turns
among themselves, and delay callers by at most the shortest turn; no bound evicts a model for them.

A loaded model keeps its turn while it is wanted (SwapCosts.turn_seconds), even against a due queue. So a cold queue
waits no longer than the bound plus, for each other due queue of the host, one turn: the end of running requests, a load
and the turn. Programs and pinned models are never evicted.

A model to be evicted is held: it takes no new requests, and the load begins when its running ones have ended. So
requests wait in the queue, never inside a load. A model that fits elsewhere is not delayed by one that does not. A
decision stands while it is possible and in demand.

`Review` is the state of one review: the planner's input, the load options and the decided loads.
"""

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from router_svc.policy.endpoints.candidates import Candidate, CandidateKey, HostMemory, Readiness
from router_svc.policy.estimates import Estimates, Recent
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.loading.cold_start_plan import Demand, LoadGate, LoadPlan, LoadStart, Resident
from router_svc.policy.loading.memory_gate import (
    HostSpace,
    held_by_other_loads,
    held_for_good,
    held_until_idle,
    refused_lately,
)
from router_svc.policy.loading.swap_cost import SwapCosts
from router_svc.policy.queue.request_class import BAND_OF
from weft.kernel.requests.request_values import Priority
from weft.kernel.values.names import ROUTE_PREFIX


@dataclass(slots=True, kw_only=True)
class PlannedLoad:
    """A decided load, which waits until its victims are idle or is under way."""

    candidate: Candidate
    queue: str
    victims: frozenset[CandidateKey]
    is_cold: bool
    why: str
    is_durable: bool = False
    """Whether it is for durable requests, for which no model used by callers is evicted."""
    was_booked: bool
    """Whether the ledger still shows a lease of the model's previous incarnation, which this load does not get."""
    begun: bool = False
    begun_at: float = 0.0
    starved_since: float | None = None
    """Since when it waits for memory in vain; None: it does not."""
    given_up: bool = False
    left: frozenset[CandidateKey] = frozenset()
    """Victims that take no more requests; the memory that the ledger still shows for them is being released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOption:
    """One way to load one model."""

    candidate: Candidate
    space: HostSpace | None
    """None: the host's memory is unknown, or the model uses none; the ledger decides."""
    victims: tuple[Resident, ...] | None
    """The models to evict; None: no eviction makes it fit."""
    turn_left: float
    """Remaining time of the victims' turns."""
    cost: float
    """What all tenants lose by it, in seconds."""
    effort_seconds: float
    """The cost plus its own load and the wait for turns; the lowest wins."""

    @property
    def has_rivals(self) -> bool:
        """Whether requests use or wait for a model that would be evicted."""
        return self.victims is None or any(victim.is_wanted for victim in self.victims)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCase:
    """A queue that demands a load, with its best option."""

    demand: Demand
    combined: Demand
    """The demand including other queues' waiting requests that the model would also serve."""
    option: LoadOption
    is_cold: bool
    """Whether no member is ready, loading or waking."""
    due_at: float
    """When models are evicted at any cost."""
    is_due: bool


DemandKey = tuple[str, bool]
"""A model, and whether the demand is durable."""
OptionsKey = tuple[tuple[str, ...], Priority, str, bool]
"""The models that may be loaded, the priority class and tenant of the waiting requests, and whether others serve them
meanwhile."""


@dataclass(slots=True)
class Review:
    """Input, caches and decisions of one review."""

    residents: Mapping[str, Sequence[Resident]]
    hosts: Mapping[str, HostMemory]
    waking: Mapping[str, Candidate]
    now: float
    spaces: dict[str, HostSpace] = field(default_factory=dict)
    waiting: dict[DemandKey, int] = field(default_factory=dict)
    """Waiting requests over all queues by the models that could serve them, durable ones separately."""
    waited: dict[DemandKey, float] = field(default_factory=dict)
    """Their waiting times in seconds."""
    planned: dict[str, list[PlannedLoad]] = field(default_factory=dict)
    """By queue."""
    losses: dict[tuple[CandidateKey, str | None], float] = field(default_factory=dict)
    """By model, and the tenant of the demand."""
    options: dict[OptionsKey, list[LoadOption]] = field(default_factory=dict)
    """Cached options, valid until the next reservation."""
    loading: Container[str] = frozenset()
    """Models that are loading, as reported by their runners or because of a wake."""
    doubted: Container[str] = frozenset()
    """Models that did not get memory that the ledger showed as free."""
    begin: list[LoadStart] = field(default_factory=list)
    give_up: list[str] = field(default_factory=list)
    gates: dict[str, LoadGate] = field(default_factory=dict)
    decided: set[str] = field(default_factory=set)
    """See `LoadPlan.decided`."""

    def space(self, candidate: Candidate) -> HostSpace | None:
        """Return its host's memory; None: the host has no ledger, or the model's size is unknown."""
        memory = self.hosts.get(candidate.host)
        if memory is None or candidate.memory_bytes <= 0:
            return None
        if candidate.host not in self.spaces:
            self.spaces[candidate.host] = HostSpace(
                memory, self.residents.get(candidate.host, ()), self.doubted, self.loading
            )
        return self.spaces[candidate.host]

    def update(self, planned: PlannedLoad) -> None:
        """Update a begun load whose model's size was reported later; a known size is kept."""
        now = self.waking.get(planned.candidate.model)
        if planned.begun and now is not None and now.memory_bytes > 0:
            planned.candidate = now

    def keys_on(self, host: str) -> frozenset[CandidateKey]:
        """Return the keys of the ready models of a host."""
        return frozenset(resident.candidate.key for resident in self.residents.get(host, ()))

    def note(self, demand: Demand) -> None:
        """Add the waiting requests of a demand to the totals."""
        for candidate in demand.asleep:
            key = (candidate.model, demand.is_durable)
            self.waiting[key] = self.waiting.get(key, 0) + demand.waiting
            self.waited[key] = self.waited.get(key, 0.0) + demand.waited_seconds

    def waiting_for(self, model: str, *, durable: bool) -> int:
        """Return how many waiting requests the model could serve; for durable ones including callers, who go first."""
        callers = self.waiting.get((model, False), 0)
        return callers + self.waiting.get((model, True), 0) if durable else callers

    def combined(self, demand: Demand, candidate: Candidate) -> Demand:
        """Return the demand plus other queues' requests that `candidate` would also serve."""
        key = (candidate.model, demand.is_durable)
        return replace(demand, waiting=self.waiting[key], waited_seconds=self.waited[key])

    def reserve(self, space: HostSpace, candidate: Candidate, evicted: Iterable[CandidateKey], **other: bool) -> None:
        """Reserve memory as `HostSpace.reserve` does, and drop the cached options."""
        self.options.clear()
        space.reserve(candidate, evicted, **other)

    def give_up_starved(self, planned: PlannedLoad, space: HostSpace, loads: bool, limits: SchedulerLimits) -> bool:
        """Give up a load under way whose runner waits in vain for memory.

        Either the holders are never evicted, or the memory seems free and is not granted. The load would otherwise keep
        its place at the ledger before all others of its host, and its requests would stay out of the queue, for as long
        as a load may wait. Short waits are tolerated. `loads`: its runner reports that it is loading. Returns whether
        to distrust the ledger's figures.
        """
        candidate = planned.candidate
        waits = planned.begun and not space.has_booked(candidate) and space.could_ever_fit(candidate)
        is_kept = waits and space.is_blocked_for_good(candidate)
        is_misjudged = waits and loads and space.fits(candidate)
        if not is_kept and not is_misjudged:
            planned.starved_since = None
            return False
        if planned.starved_since is None:
            planned.starved_since = self.now
        patience = limits.min_turn_seconds if is_kept else limits.lease_patience_seconds
        if planned.given_up or self.now < planned.starved_since + patience:
            return False
        planned.given_up = True
        self.give_up.append(candidate.model)
        return is_misjudged

    def held_by(self, planned: PlannedLoad) -> Iterable[CandidateKey]:
        """Return its victims that are still ready; all of them if the host's residents are unknown."""
        if planned.candidate.host not in self.residents:
            return planned.victims
        return [victim.candidate.key for victim in self.present(planned)]

    def present(self, planned: PlannedLoad) -> list[Resident]:
        """Return its victims that are still ready."""
        among = self.residents.get(planned.candidate.host, ())
        return [resident for resident in among if resident.candidate.key in planned.victims]


MAX_REMEMBERED_MODELS = 16_384
"""Maximum models with a remembered last ready time; the least recently seen is dropped first."""


class LoadPlanner:
    """Plans loads. It remembers only the loads that it decided; each review gets everything else."""

    def __init__(self, limits: SchedulerLimits, estimates: Estimates) -> None:
        self._limits = limits
        self._estimates = estimates
        self._costs = SwapCosts(limits, estimates)
        self._planned: dict[str, PlannedLoad] = {}
        """By model."""
        self._last_resident: Recent[str, float] = Recent(MAX_REMEMBERED_MODELS)
        self._no_memory_until: Recent[str, float] = Recent(MAX_REMEMBERED_MODELS)
        self._doubted_until: Recent[str, float] = Recent(MAX_REMEMBERED_MODELS)

    def review(
        self,
        demands: Sequence[Demand],
        residents: Mapping[str, Sequence[Resident]],
        hosts: Mapping[str, HostMemory],
        waking: Mapping[str, Candidate],
        now: float,
        *,
        loading: AbstractSet[str] = frozenset(),
    ) -> LoadPlan:
        """Return the plan.

        `residents` by host, at least of the hosts that `demands` concern. `waking`: current state of the models with a
        wake under way. `loading`: models whose runners report that they are loading. The cost is proportional to the
        demands, their sleeping models, and the residents of their hosts.
        """
        doubted = {model for model, until in self._doubted_until.items() if until > now}
        review = Review(residents, hosts, waking, now, doubted=doubted, loading=loading | waking.keys())
        for resident in (each for on_host in residents.values() for each in on_host):
            self._last_resident.put(resident.candidate.model, now)
        for demand in demands:
            review.note(demand)
        self._keep_planned({demand.queue: demand for demand in demands}, review)
        for demand in sorted(demands, key=lambda each: self._turn(each, now)):
            self._consider(demand, review)
        instead = {key: model for model, planned in self._planned.items() for key in review.held_by(planned)}
        return LoadPlan(
            begin=tuple(review.begin),
            hold=frozenset(instead),
            instead=instead,
            give_up=tuple(review.give_up),
            gates=review.gates,
            decided=frozenset(review.decided),
        )

    def note_no_memory(self, model: str, now: float) -> None:
        """Record that a load that was begun found no memory; it is retried after a pause."""
        self._planned.pop(model, None)
        self._no_memory_until.put(model, now + self._limits.memory_retry_seconds)

    def _due_at(self, demand: Demand) -> float:
        """Return when models are evicted at any cost; infinity for a demand that is durable or not cold."""
        if demand.ready_slots > 0 or demand.is_durable:
            return math.inf
        unloaded = max((self._last_resident.get(each.model, -math.inf) for each in demand.asleep), default=-math.inf)
        return max(demand.oldest_arrived_at, unloaded) + self._limits.max_cold_wait_seconds

    def _turn(self, demand: Demand, now: float) -> tuple[bool, float, int, float, int, int, float, float]:
        """Return the sort key of a demand; the lowest is considered first."""
        due_at = self._due_at(demand)
        is_due = due_at <= now
        deadline = math.inf if demand.deadline_at is None else demand.deadline_at
        due_order = due_at if is_due else math.inf
        standing = (BAND_OF[demand.priority], demand.account, demand.turn, demand.priority)
        return (not is_due, due_order, *standing, deadline, demand.oldest_arrived_at)

    def _keep_planned(self, demands: Mapping[str, Demand], review: Review) -> None:
        """Drop finished and unwanted loads, reserve memory for the others, and begin those that can begin."""
        for model, planned in tuple(self._planned.items()):
            if not (model in review.waking if planned.begun else self._still_stands(planned, demands, review)):
                del self._planned[model]
                continue
            review.planned.setdefault(planned.queue, []).append(planned)
            review.update(planned)
            if planned.begun and planned.candidate.host in review.residents:
                here = frozenset(victim.candidate.key for victim in review.present(planned))
                # A victim that was loaded again is not held for this load a second time.
                left = planned.left | planned.victims - here
                planned.left = frozenset(key for key in left if key[0] not in self._planned)
                planned.victims = here
            space = review.space(planned.candidate)
            if space is not None:
                self._make_room_for_stuck(planned, space, review)
                if review.give_up_starved(planned, space, _loads(model, demands.get(planned.queue)), self._limits):
                    self._doubted_until.put(model, review.now + self._limits.book_doubt_seconds)
                is_booked = space.has_booked(planned.candidate)
                planned.was_booked &= is_booked
                if is_booked and not planned.was_booked and model in review.doubted:
                    planned.victims = frozenset()  # more were held than necessary
                evicted = planned.victims | planned.left - review.keys_on(planned.candidate.host)
                review.reserve(space, planned.candidate, evicted, is_booked=is_booked and not planned.was_booked)
            if not planned.begun:
                self._begin_when_idle(planned, review)

    def _still_stands(self, planned: PlannedLoad, demands: Mapping[str, Demand], review: Review) -> bool:
        """Whether a waiting load is still wanted and its victims suffice; if not, it is planned again."""
        demand = demands.get(planned.queue)
        if demand is None or (planned.is_cold and demand.ready_slots > 0) or planned.candidate.model in review.waking:
            return False
        now_asleep = next((each for each in demand.asleep if each.key == planned.candidate.key), None)
        space = None if now_asleep is None else review.space(now_asleep)
        if now_asleep is None or space is None:
            return False
        planned.candidate = now_asleep
        evictable = [
            victim for victim in review.present(planned) if self._costs.may_be_evicted_for(demand, victim, review.now)
        ]
        able = [victim for victim in evictable if space.is_evictable(victim)]
        needed = space.victims(now_asleep, able, lambda victim: (0.0, self._costs.loss(victim, demand, review.now)))
        if needed is None:
            return False
        planned.victims = frozenset(victim.candidate.key for victim in needed)
        return True

    def _begin_when_idle(self, planned: PlannedLoad, review: Review) -> None:
        """Begin a load once its victims have finished their requests."""
        victims = review.present(planned)
        if all(victim.active == 0 for victim in victims):
            planned.begun, planned.begun_at = True, review.now
            review.begin.append(LoadStart(candidate=planned.candidate, why=planned.why, evicts=bool(victims)))
            return
        message = held_until_idle(planned.candidate, planned.candidate.host, victims)
        review.decided.add(planned.queue)
        review.gates[planned.queue] = LoadGate(reason=message, eta_seconds=self._ready_in(planned.candidate, victims))

    def _make_room_for_stuck(self, planned: PlannedLoad, space: HostSpace, review: Review) -> None:
        """Evict models for a load under way that finds no memory, once their turns have ended.

        It began while the host's memory was unknown, or other loads took it meanwhile. The ledger evicts only idle
        models, so a model that is never idle would block the load.
        """
        is_stuck = planned.begun and review.now >= planned.begun_at + self._limits.min_turn_seconds
        if not is_stuck or planned.victims or space.has_booked(planned.candidate) or space.fits(planned.candidate):
            return
        over = [
            resident
            for resident in review.residents.get(planned.candidate.host, ())
            if space.is_evictable(resident)
            and not (planned.is_durable and resident.serves_callers)
            and not self._costs.turn_left(resident, None, review.now)
        ]
        evicted = space.victims(planned.candidate, over, lambda each: (0.0, self._loss(each, None, review))) or ()
        planned.victims = frozenset(victim.candidate.key for victim in evicted)

    def _consider(self, demand: Demand, review: Review) -> None:
        """Decide whether a queue gets another load now."""
        slots_to_come = self._slots_to_come(demand, review)
        pending = next((planned for planned in self._planned_for(demand, review) if not planned.begun), None)
        if pending is not None:
            message = review.gates.get(pending.queue)
            review.decided.add(demand.queue)
            if message is not None:
                review.gates[demand.queue] = message
            return
        counts = (review.waiting_for(each.model, durable=demand.is_durable) for each in demand.asleep)
        waiting = max(counts, default=demand.waiting)
        if slots_to_come and waiting <= slots_to_come:
            return
        options = self._options(demand, review)
        if not options:
            self._explain_pause(demand, review)
            return
        self._decide(demand, options[0], is_first=slots_to_come == 0, review=review)

    def _planned_for(self, demand: Demand, review: Review) -> list[PlannedLoad]:
        own = review.planned.get(demand.queue, [])
        shared = [self._planned[each.model] for each in demand.asleep if each.model in self._planned]
        return own + [planned for planned in shared if planned.queue != demand.queue]

    def _slots_to_come(self, demand: Demand, review: Review) -> int:
        """Return the slots of models that are being loaded for this queue, by this planner or otherwise."""
        begun = [planned.candidate for planned in self._planned_for(demand, review) if planned.begun]
        loading = {candidate.model: candidate for candidate in begun}
        loading |= {each.model: each for each in demand.asleep if each.model in review.waking}
        return demand.loading_slots + sum(max(1, candidate.slots) for candidate in loading.values())

    def _options(self, demand: Demand, review: Review) -> list[LoadOption]:
        """Return every way to load a model for this queue, best first."""
        candidates = [
            candidate
            for candidate in demand.asleep
            if candidate.model not in review.waking
            and candidate.model not in self._planned
            and self._no_memory_until.get(candidate.model, -math.inf) <= review.now
        ]
        key = (tuple(each.model for each in candidates), demand.priority, demand.tenant, demand.ready_slots > 0)
        found = review.options.get(key)
        if found is None:
            found = review.options[key] = [self._option(demand, candidate, review) for candidate in candidates]
        is_route = demand.queue.startswith(ROUTE_PREFIX)

        def rank(index: int) -> tuple[bool, bool, float, int]:
            option = found[index]
            # A route lists its models in order of preference.
            return option.victims is None, option.has_rivals, 0.0 if is_route else option.effort_seconds, index

        return [found[index] for index in sorted(range(len(found)), key=rank)]

    def _option(self, demand: Demand, candidate: Candidate, review: Review) -> LoadOption:
        space, load_seconds = review.space(candidate), self._costs.load_seconds(candidate)
        # A model larger than its host is still requested, as the ledger refuses it immediately and reports the figures.
        if space is None or space.fits(candidate) or not space.could_ever_fit(candidate):
            cost = self._costs.cost(demand, candidate, (), review.now)
            return LoadOption(
                candidate=candidate,
                space=space,
                victims=(),
                turn_left=0.0,
                cost=cost,
                effort_seconds=cost + load_seconds,
            )
        able = self._able(demand, candidate, review)
        turns = {each.candidate.key: self._costs.turn_left(each, demand, review.now) for each in able}
        victims = space.victims(
            candidate, able, lambda each: (turns[each.candidate.key], self._loss(each, demand, review))
        )
        cost = self._costs.cost(demand, candidate, victims or (), review.now)
        turn_left = max((turns[victim.candidate.key] for victim in victims or ()), default=0.0)
        return LoadOption(
            candidate=candidate,
            space=space,
            victims=victims,
            turn_left=turn_left,
            cost=cost,
            effort_seconds=turn_left + cost + load_seconds,
        )

    def _loss(self, resident: Resident, demand: Demand | None, review: Review) -> float:
        key = (resident.candidate.key, None if demand is None else demand.tenant)
        known = review.losses.get(key)
        if known is None:
            known = review.losses[key] = self._costs.loss(resident, demand, review.now)
        return known

    def _decide(self, demand: Demand, option: LoadOption, *, is_first: bool, review: Review) -> None:
        """Begin the load, hold its victims, or record what blocks it."""
        due_at, is_cold = self._due_at(demand), demand.ready_slots == 0 and is_first
        case = LoadCase(
            demand=demand,
            combined=review.combined(demand, option.candidate),
            option=option,
            is_cold=is_cold,
            due_at=due_at,
            is_due=is_cold and due_at <= review.now,
        )
        if option.victims is None:
            self._wait_for_others(case, review)
            return
        if self._is_to_begin(case, option.victims, review.now):
            if option.turn_left <= 0:
                self._start(case, option.victims, review)
                return
            if case.is_due:
                review.decided.add(demand.queue)
            if case.is_due and option.space is not None:
                # Reserve the memory, as the turn that the load waits for may become shorter.
                review.reserve(option.space, option.candidate, (victim.candidate.key for victim in option.victims))
        if is_cold:
            review.gates[demand.queue] = self._gate_word(case, option.victims, review.now)

    def _is_to_begin(self, case: LoadCase, victims: Sequence[Resident], now: float) -> bool:
        is_free = case.is_cold and not victims
        return is_free or case.is_due or self._costs.is_worth_it(case.combined, case.option.candidate, victims, now)

    def _wait_for_others(self, case: LoadCase, review: Review) -> None:
        """Handle a load that does not fit even if every evictable model is evicted."""
        candidate, space, queue = case.option.candidate, case.option.space, case.demand.queue
        assert space is not None, "only where the memory is known can it be missing"
        if not case.is_cold:
            return
        if space.is_blocked_for_good(candidate):
            review.gates[queue] = LoadGate(reason=held_for_good(candidate, space))
            return
        if case.is_due:
            review.decided.add(queue)
            # It waits for earlier loads; later ones must not take the memory that those release.
            able = self._able(case.demand, candidate, review)
            review.reserve(space, candidate, (each.candidate.key for each in able))
        before = [each.candidate.model for each in self._planned.values() if each.candidate.host == candidate.host]
        review.gates[queue] = LoadGate(reason=held_by_other_loads(candidate, space, before))

    def _able(self, demand: Demand, candidate: Candidate, review: Review) -> list[Resident]:
        """Return the models that may be evicted for it. Members of a pool are not evicted for each other."""
        space = review.space(candidate)
        return [
            resident
            for resident in review.residents.get(candidate.host, ())
            if space is not None
            and space.is_evictable(resident)
            and self._costs.may_be_evicted_for(demand, resident, review.now)
            and not (demand.ready_slots > 0 and resident.candidate.pool == candidate.pool)
        ]

    def _start(self, case: LoadCase, victims: Sequence[Resident], review: Review) -> None:
        option, evicted = case.option, frozenset(victim.candidate.key for victim in victims)
        planned = PlannedLoad(
            candidate=option.candidate,
            queue=case.demand.queue,
            victims=evicted,
            is_cold=case.is_cold,
            why=self._why(case, victims),
            is_durable=case.demand.is_durable,
            was_booked=option.space is not None and option.space.has_booked(option.candidate),
        )
        self._planned[option.candidate.model] = planned
        review.planned.setdefault(planned.queue, []).append(planned)
        if option.space is not None:
            review.reserve(option.space, option.candidate, evicted)
        self._begin_when_idle(planned, review)

    def _why(self, case: LoadCase, victims: Sequence[Resident]) -> str:
        option = case.option
        if option.space is None:
            return "its memory use is unknown; the ledger decides"
        if not victims:
            fits = option.space.fits(option.candidate)
            room = "there is room for it" if fits else "it is larger than its host, which the ledger has to say"
            return room if case.is_cold else f"{room}, and those that are ready are not enough"
        evicts = f"it evicts {', '.join(victim.candidate.model for victim in victims)}"
        if case.is_due:
            return f"{case.demand.queue} waited as long as a queue without a loaded model may; {evicts}"
        value = self._costs.value(case.combined, victims)
        return f"waiting is worth {value:.1f} s, the swap costs {option.cost:.1f} s; {evicts}"

    def _gate_word(self, case: LoadCase, victims: Sequence[Resident], now: float) -> LoadGate:
        candidate, until_due = case.option.candidate, max(0.0, case.due_at - now)
        until_worth = self._costs.seconds_until_worth(case.combined, candidate, victims, now)
        decided_in = until_due if until_worth is None else min(until_due, until_worth)
        ready_in = self._ready_in(candidate, victims)
        eta = None if ready_in is None else max(case.option.turn_left, decided_in) + ready_in
        reason = held_until_idle(candidate, candidate.host, victims)
        return LoadGate(reason=reason, eta_seconds=None if eta == math.inf else eta)

    def _ready_in(self, candidate: Candidate, victims: Iterable[Resident]) -> float | None:
        """Return the time of its load after `victims` are held; None: unknown."""
        load = self._estimates.load_seconds(candidate)
        ends = [self._estimates.mean_service_seconds(each.candidate) for each in victims if each.active > 0]
        known = [end for end in ends if end is not None]
        if load is None or len(known) < len(ends):
            return None
        return load + max(known, default=0.0)

    def _explain_pause(self, demand: Demand, review: Review) -> None:
        """Record what blocks a queue whose models recently found no memory."""
        paused = [each for each in demand.asleep if self._no_memory_until.get(each.model, -math.inf) > review.now]
        if not paused or demand.ready_slots > 0:
            return
        soonest = min(paused, key=lambda each: self._no_memory_until[each.model])
        space = review.space(soonest)
        if space is not None and space.is_blocked_for_good(soonest):
            review.gates[demand.queue] = LoadGate(reason=held_for_good(soonest, space))
            return
        seconds = self._no_memory_until[soonest.model] - review.now
        load = self._estimates.load_seconds(soonest)
        eta_seconds = None if load is None else seconds + load
        reason = refused_lately(soonest, seconds)
        review.gates[demand.queue] = LoadGate(reason=reason, eta_seconds=eta_seconds)


def _loads(model: str, demand: Demand | None) -> bool:
    """Whether the model's runner reports that it is loading."""
    asleep = () if demand is None else demand.asleep
    return any(each.model == model and each.readiness is Readiness.LOADING for each in asleep)
