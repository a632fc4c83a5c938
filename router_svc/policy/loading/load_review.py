"""State of one review of the load planner: decided loads, options to load, and the planner's input."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from router_svc.policy.endpoints.candidates import Candidate, CandidateKey
from router_svc.policy.endpoints.host_memory import HostMemory
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.loading.load_plan import Demand, LoadGate, LoadStart, Resident
from router_svc.policy.loading.memory_gate import HostSpace
from router_svc.policy.loading.swap_cost import PRIORITY_WEIGHTS
from weft.kernel.request import Priority


@dataclass(slots=True, kw_only=True)
class PlannedLoad:
    """A decided load: it waits until its victims are idle, or is under way."""

    candidate: Candidate
    queue: str
    victims: frozenset[CandidateKey]
    is_cold: bool
    why: str
    is_durable: bool = False
    """Whether it is for durable requests, for which no model is evicted that callers use."""
    was_booked: bool
    """Whether the ledger still has a lease of the model's previous incarnation, which this load does not get."""
    begun: bool = False
    begun_at: float = 0.0
    starved_since: float | None = None
    """Since when it waits for memory that it does not get; None: it does not."""
    given_up: bool = False
    """Whether it was given up already."""
    left: frozenset[CandidateKey] = frozenset()
    """Victims that take no requests any more; the memory that the ledger still shows for them is being released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOption:
    """One way to load one model."""

    candidate: Candidate
    space: HostSpace | None
    """None: the memory there is unknown, or the model uses none; the ledger decides."""
    victims: tuple[Resident, ...] | None
    """The models to evict; None: it does not fit whatever is evicted."""
    turn_left: float
    """Remaining time of the victims' turns."""
    cost: float
    """What all tenants lose by it, in seconds."""
    effort_seconds: float
    """The cost plus its own load and the wait for turns: the option with the lowest effort is taken."""

    @property
    def has_rivals(self) -> bool:
        """Whether requests use or wait for a model that would have to be evicted."""
        return self.victims is None or any(victim.is_wanted for victim in self.victims)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCase:
    """A queue that demands a load, with its best option."""

    demand: Demand
    combined: Demand
    """The demand with the waiting requests of other queues that the model would serve too."""
    option: LoadOption
    is_cold: bool
    """Whether no member is ready, loading or waking."""
    due_at: float
    """When models are evicted whatever that costs."""
    is_due: bool


AskedOf = tuple[str, bool]
"""A model, and whether durable requests demand it."""
OptionsKey = tuple[tuple[str, ...], Priority, bool]
"""The models that may be loaded, the priority class of the waiting requests, and whether others serve them
meanwhile."""


@dataclass(slots=True)
class Review:
    """Knowledge and decisions of one review."""

    residents: Mapping[str, Sequence[Resident]]
    hosts: Mapping[str, HostMemory]
    waking: Mapping[str, Candidate]
    now: float
    spaces: dict[str, HostSpace] = field(default_factory=dict)
    waiting: dict[AskedOf, int] = field(default_factory=dict)
    """Waiting requests over all queues, by the models that could serve them; durable ones apart."""
    waited: dict[AskedOf, float] = field(default_factory=dict)
    """Their waiting times in seconds, weighted by priority class."""
    planned: dict[str, list[PlannedLoad]] = field(default_factory=dict)
    """By queue."""
    losses: dict[CandidateKey, float] = field(default_factory=dict)
    """Cached losses of evicting a model."""
    options: dict[OptionsKey, list[LoadOption]] = field(default_factory=dict)
    """Cached options, valid until the next reservation."""
    loading: Container[str] = frozenset()
    """Models that load as their runners report, or because they are being woken."""
    doubted: Container[str] = frozenset()
    """Models that did not get the memory that the ledger showed as free."""
    begin: list[LoadStart] = field(default_factory=list)
    give_up: list[str] = field(default_factory=list)
    gates: dict[str, LoadGate] = field(default_factory=dict)
    decided: set[str] = field(default_factory=set)
    """See `LoadPlan.decided`."""

    def space(self, candidate: Candidate) -> HostSpace | None:
        """Return the memory of its host; None: the host has no ledger, or the model's size is unknown."""
        memory = self.hosts.get(candidate.host)
        if memory is None or candidate.memory_bytes <= 0:
            return None
        if candidate.host not in self.spaces:
            self.spaces[candidate.host] = HostSpace(
                memory, self.residents.get(candidate.host, ()), self.doubted, self.loading
            )
        return self.spaces[candidate.host]

    def update(self, planned: PlannedLoad) -> None:
        """Update a load whose runner reported the model's size after the load had begun; a known size is kept."""
        now = self.waking.get(planned.candidate.model)
        if planned.begun and now is not None and now.memory_bytes > 0:
            planned.candidate = now

    def keys_on(self, host: str) -> frozenset[CandidateKey]:
        """Return the keys of the ready models of a host."""
        return frozenset(resident.candidate.key for resident in self.residents.get(host, ()))

    def note(self, demand: Demand) -> None:
        """Add the waiting requests of a demand to the totals."""
        for candidate in demand.asleep:
            asked, counted = (
                (candidate.model, demand.is_durable),
                PRIORITY_WEIGHTS[demand.priority] * demand.waited_seconds,
            )
            self.waiting[asked] = self.waiting.get(asked, 0) + demand.waiting
            self.waited[asked] = self.waited.get(asked, 0.0) + counted

    def waiting_for(self, model: str, *, durable: bool) -> int:
        """Return how many waiting requests the model could serve.

        For durable ones callers count too, since they go first.
        """
        callers = self.waiting.get((model, False), 0)
        return callers + self.waiting.get((model, True), 0) if durable else callers

    def combined(self, demand: Demand, candidate: Candidate) -> Demand:
        """Return the demand with the requests of other queues that `candidate` would serve too, weighted by class."""
        asked = (candidate.model, demand.is_durable)
        waited_seconds = self.waited[asked] / PRIORITY_WEIGHTS[demand.priority]
        return replace(demand, waiting=self.waiting[asked], waited_seconds=waited_seconds)

    def reserve(self, space: HostSpace, candidate: Candidate, evicted: Iterable[CandidateKey], **other: bool) -> None:
        """Reserve memory as `HostSpace.reserve` does, and drop the cached options."""
        self.options.clear()
        space.reserve(candidate, evicted, **other)

    def give_up_starved(self, planned: PlannedLoad, space: HostSpace, loads: bool, limits: SchedulerLimits) -> bool:
        """Give up a load under way whose runner waits for memory that it does not get.

        Either the memory is held by what is never evicted, or it seems to be free and is not granted. The load would
        keep its place at the ledger before all others of its host, and its requests would not be in the queue, for as
        long as a load may wait. Short waits are tolerated. `loads`: its runner reports that it is loading. Returns
        whether the ledger's figures are to be doubted.
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
        """Return its victims that are still ready; all of them on a host without residents data."""
        if planned.candidate.host not in self.residents:
            return planned.victims
        return [victim.candidate.key for victim in self.present(planned)]

    def present(self, planned: PlannedLoad) -> list[Resident]:
        """Return its victims that are still ready."""
        among = self.residents.get(planned.candidate.host, ())
        return [resident for resident in among if resident.candidate.key in planned.victims]
