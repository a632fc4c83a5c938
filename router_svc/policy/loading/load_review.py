"""What one review of the load planner works with: loads that are decided, ways to load, and all that it was told."""

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
    """A load that is decided: it waits until its victims are idle, or is under way."""

    candidate: Candidate
    queue: str
    victims: frozenset[CandidateKey]
    is_cold: bool
    why: str
    is_durable: bool = False
    """Whether it is for durable requests, to which nothing gives way that callers use."""
    was_booked: bool
    """Whether the book still has a lease of its last life, which is not the one that this load gets."""
    begun: bool = False
    begun_at: float = 0.0
    in_vain_since: float | None = None
    """Since when it waits for memory that does not come; None: it does not."""
    given_up: bool = False
    """Whether it was said already that it gets no memory."""
    left: frozenset[CandidateKey] = frozenset()
    """Victims that take no requests any more; what the book still says of them is on its way back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOption:
    """One way to load one model."""

    candidate: Candidate
    space: HostSpace | None
    """None: nobody knows the memory there, or the model takes none; the ledger decides."""
    victims: tuple[Resident, ...] | None
    """Who gives way; None: it does not fit whoever does."""
    turn_left: float
    """How long the turns of the victims still last."""
    cost: float
    """What everybody loses by it, in seconds."""
    effort_seconds: float
    """The same with its own load and the wait for turns: of two ways the lower one is taken."""

    @property
    def has_rivals(self) -> bool:
        """Whether somebody wants what would have to give way."""
        return self.victims is None or any(victim.is_wanted for victim in self.victims)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCase:
    """A line that wants a load, and the best way to it."""

    demand: Demand
    joint: Demand
    """With what waits in other lines that the model would serve too."""
    option: LoadOption
    is_cold: bool
    """Whether nothing takes its requests, and nothing is on the way to."""
    due_at: float
    """When others have to give way whatever it costs."""
    is_due: bool


AskedOf = tuple[str, bool]
"""A model, and whether durable requests ask for it."""
OptionsKey = tuple[tuple[str, ...], Priority, bool]
"""The models that may be loaded, the band of who waits for them, and whether others serve it meanwhile."""


@dataclass(slots=True)
class Review:
    """What one review knows and has decided."""

    residents: Mapping[str, Sequence[Resident]]
    hosts: Mapping[str, HostMemory]
    waking: Mapping[str, Candidate]
    now: float
    spaces: dict[str, HostSpace] = field(default_factory=dict)
    waiting: dict[AskedOf, int] = field(default_factory=dict)
    """Requests that wait, over all lines, by the models that could serve them; durable ones apart."""
    waited: dict[AskedOf, float] = field(default_factory=dict)
    """How many seconds they waited, each by what it counts for."""
    swaps: dict[str, list[PlannedLoad]] = field(default_factory=dict)
    """By line."""
    losses: dict[CandidateKey, float] = field(default_factory=dict)
    """What is lost when they give way, by whoever was asked about."""
    options: dict[OptionsKey, list[LoadOption]] = field(default_factory=dict)
    """What was found already, as long as nothing else is promised."""
    loading: Container[str] = frozenset()
    """Models that load, by their runners' word or because they are being woken."""
    doubted: Container[str] = frozenset()
    """Models that did not get the memory that the book said was free."""
    begin: list[LoadStart] = field(default_factory=list)
    give_up: list[str] = field(default_factory=list)
    gates: dict[str, LoadGate] = field(default_factory=dict)
    decided: set[str] = field(default_factory=set)
    """See LoadPlan.decided."""

    def space(self, candidate: Candidate) -> HostSpace | None:
        """The memory of its host; None where there is no book of it or the model's size is unknown."""
        memory = self.hosts.get(candidate.host)
        if memory is None or candidate.memory_bytes <= 0:
            return None
        if candidate.host not in self.spaces:
            self.spaces[candidate.host] = HostSpace(
                memory, self.residents.get(candidate.host, ()), self.doubted, self.loading
            )
        return self.spaces[candidate.host]

    def look_again(self, swap: PlannedLoad) -> None:
        """A runner may say only after its load was begun what a model takes; what was known once stays known."""
        now = self.waking.get(swap.candidate.model)
        if swap.begun and now is not None and now.memory_bytes > 0:
            swap.candidate = now

    def keys_on(self, host: str) -> frozenset[CandidateKey]:
        """What takes requests there."""
        return frozenset(resident.candidate.key for resident in self.residents.get(host, ()))

    def note(self, demand: Demand) -> None:
        """A line waits."""
        for candidate in demand.asleep:
            asked, counted = (
                (candidate.model, demand.is_durable),
                PRIORITY_WEIGHTS[demand.priority] * demand.waited_seconds,
            )
            self.waiting[asked] = self.waiting.get(asked, 0) + demand.waiting
            self.waited[asked] = self.waited.get(asked, 0.0) + counted

    def waiting_for(self, model: str, *, durable: bool) -> int:
        """How many wait that this model could serve: callers, or `durable`: everybody, since callers go first."""
        callers = self.waiting.get((model, False), 0)
        return callers + self.waiting.get((model, True), 0) if durable else callers

    def joint(self, demand: Demand, candidate: Candidate) -> Demand:
        """With what waits in other lines that `candidate` would serve too, each second by what it counts for."""
        asked = (candidate.model, demand.is_durable)
        waited_seconds = self.waited[asked] / PRIORITY_WEIGHTS[demand.priority]
        return replace(demand, waiting=self.waiting[asked], waited_seconds=waited_seconds)

    def reserve(self, space: HostSpace, candidate: Candidate, evicted: Iterable[CandidateKey], **other: bool) -> None:
        """See HostSpace.reserve. What was found before it may not be possible any more."""
        self.options.clear()
        space.reserve(candidate, evicted, **other)

    def give_up_in_vain(self, swap: PlannedLoad, space: HostSpace, loads: bool, limits: SchedulerLimits) -> bool:
        """Give up a load under way that waits inside of its runner for memory that does not come.

        Either somebody took it who gives way for nobody, or it seems to be free and is not granted. It would keep its
        place at the ledger before everybody else on its host, and those who wait for it would not be in the queue, for
        as long as a load may wait. What holds for a moment only is waited for. `loads`: its runner says that it loads.
        Returns whether the book is to be doubted.
        """
        candidate = swap.candidate
        waits = swap.begun and not space.has_booked(candidate) and space.could_ever_fit(candidate)
        is_kept = waits and space.is_blocked_for_good(candidate)
        is_misjudged = waits and loads and space.fits(candidate)
        if not is_kept and not is_misjudged:
            swap.in_vain_since = None
            return False
        if swap.in_vain_since is None:
            swap.in_vain_since = self.now
        patience = limits.min_turn_seconds if is_kept else limits.lease_patience_seconds
        if swap.given_up or self.now < swap.in_vain_since + patience:
            return False
        swap.given_up = True
        self.give_up.append(candidate.model)
        return is_misjudged

    def held_by(self, swap: PlannedLoad) -> Iterable[CandidateKey]:
        """Those of its victims that still take requests; all of them on a host of which nothing was told."""
        if swap.candidate.host not in self.residents:
            return swap.victims
        return [victim.candidate.key for victim in self.present(swap)]

    def present(self, swap: PlannedLoad) -> list[Resident]:
        """Those of its victims that still take requests."""
        among = self.residents.get(swap.candidate.host, ())
        return [resident for resident in among if resident.candidate.key in swap.victims]
