"""A scenario: what there is, who asks, and what goes wrong. Times are seconds from its beginning."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from random import Random

from router_svc.policy.endpoints.routes import Route
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.settings import Settings
from weft.kernel.request import Priority, Skill


def seeded_random(seed: int, purpose: str) -> Random:
    """A source of its own for each purpose, so that drawing more for one changes nothing for another."""
    return Random(f"{seed}/{purpose}")  # noqa: S311 - a simulation, nothing secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much of something: log-normal around a mean, because lengths and times of language models are skewed so."""

    mean: float
    variation: float = 0.0
    """Standard deviation divided by the mean; 0: always the mean."""
    lowest: float = 0.0
    highest: float = math.inf

    def draw(self, random: Random) -> float:
        """One value."""
        if not self.variation or not self.mean:
            return min(max(self.mean, self.lowest), self.highest)
        sigma_squared = math.log1p(self.variation**2)
        value = random.lognormvariate(math.log(self.mean) - sigma_squared / 2, math.sqrt(sigma_squared))
        return min(max(value, self.lowest), self.highest)

    def draw_count(self, random: Random) -> int:
        """One value as a whole number."""
        return round(self.draw(random))

    @property
    def largest_likely(self) -> float:
        """What nearly all values stay under: the mean and five standard deviations, or the bound."""
        return min(self.mean * (1 + 5 * self.variation), self.highest)


GIBIBYTE = 1024**3
USUAL_LOAD_SECONDS = Amount(mean=10.0)
USUAL_PROMPT_TOKENS = Amount(mean=400.0, variation=1.0, lowest=1.0, highest=100_000.0)
USUAL_OUTPUT_TOKENS = Amount(mean=200.0, variation=1.0, lowest=1.0, highest=100_000.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """Hosts of one kind, each with one runner of the host's name."""

    name: str
    count: int = 1
    """One is called by the group's name, several by it and a number: `lab-1`."""
    memory_bytes: int = 0
    """Accelerator memory that may be booked; 0: none."""
    program_bytes: int = 0
    """Of it, what a program holds all the time."""
    unowned_bytes: int = 0
    """Of it, what a model holds all the time that is not in the mesh any more."""
    max_requests: int = 0
    """Requests that its runner works on at once over all its models; 0: as many as there are slots."""

    def host_names(self) -> tuple[str, ...]:
        """Each of them."""
        if self.count == 1:
            return (self.name,)
        return tuple(f"{self.name}-{number}" for number in range(1, self.count + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """A model, on one host or several."""

    name: str
    """Its pool. On one host it is called so itself, else by it and a number: `qwen-1`."""
    hosts: tuple[str, ...] = ()
    """Hosts or groups of hosts that have it; empty: all. A remote one has none."""
    memory_bytes: int = 0
    load_seconds: Amount = USUAL_LOAD_SECONDS
    slots: int = 4
    prefill_tokens_per_second: float = 2000.0
    """In each slot, while all are busy."""
    decode_tokens_per_second: float = 40.0
    """In each slot, while all are busy."""
    context_tokens: int = 0
    """0: unknown."""
    skills: frozenset[Skill] | None = None
    """None: unknown."""
    remote: bool = False
    """Whether it runs off the premises: then it takes no memory and is always loaded."""
    loaded: bool = False
    """Whether it is loaded at the beginning, where there is room."""
    pinned: bool = False
    keep_alive_seconds: float | None = None
    """How long it stays loaded without a request; None: until its memory is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who asks. Weight, cap and permission are in the settings."""

    name: str
    bands: Mapping[Priority, float] = field(default_factory=lambda: {Priority.NORMAL: 1.0})
    """How its requests are divided over the bands."""


class Pattern(Enum):
    """How arrivals are spread over time."""

    POISSON = "poisson"
    CONSTANT = "constant"
    """Evenly spaced."""
    BURST = "burst"
    """Poisson, and `factor` times as many for `high_seconds` at the beginning of each `period_seconds`."""
    DIURNAL = "diurnal"
    """Poisson, going up and down like a sine, `factor` times the mean at the top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How often somebody asks."""

    per_second: float
    pattern: Pattern = Pattern.POISSON
    factor: float = 1.0
    period_seconds: float = 60.0
    high_seconds: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests of one tenant for one target."""

    tenant: str
    target: str
    """A model or a pool; or `route/` and a route."""
    rate: Rate
    prompt_tokens: Amount = USUAL_PROMPT_TOKENS
    output_tokens: Amount = USUAL_OUTPUT_TOKENS
    max_output_tokens: int | None = None
    """What requests say; longer answers are cut off there."""
    deadline_seconds: float | None = None
    """From its arrival to its end; None: none."""
    patience_seconds: float | None = None
    """Callers who have seen nothing of their answer by then go; None: they wait."""
    allow_remote: bool = False
    """Whether requests say that they may leave the premises; the tenant's settings have a say too."""
    skills: frozenset[Skill] = frozenset()
    sessions: int = 0
    """Conversations at a time among which requests are divided; 0: each stands alone."""
    session_cached_share: float = 0.8
    """Of a prompt, what the last turn of its conversation left in the cache of the model that served it."""
    session_affinity: bool = False
    """Whether requests name their conversation; otherwise only the beginnings of their prompts tell it."""
    from_seconds: float = 0.0
    until_seconds: float | None = None
    """None: to the end."""


class FailureMode(Enum):
    """What goes wrong on a host."""

    DIES = "dies"
    """Its runner is gone with all it was doing, and returns with nothing loaded."""
    BREAKS = "breaks"
    """A share of the attempts fails before any content."""
    SLOW = "slow"
    """All takes `factor` times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Something goes wrong for a while."""

    mode: FailureMode
    hosts: tuple[str, ...] = ()
    """Hosts or groups; empty: all. What runs off the premises is on a host of the model's name."""
    at_seconds: float
    for_seconds: float
    share: float = 1.0
    """Of attempts that break."""
    factor: float = 1.0
    """How many times as long all takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """How long news take."""

    report_seconds: float = 0.1
    """From a change on a host until the router hears of it."""
    death_noticed_seconds: float = 1.0
    """From the end of a runner until the router hears of it."""
    failure_seconds: float = 0.05
    """From a grant until a failed attempt is known to have failed."""
    unload_seconds: float = 0.5
    """From being asked to give way until the memory is seen back."""
    memory_watch_seconds: float = 0.5
    """How often the router looks at the book of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """All of it."""

    name: str
    hosts: tuple[HostGroup, ...]
    models: tuple[ModelKind, ...]
    tenants: tuple[Tenant, ...]
    traffic: tuple[Traffic, ...]
    routes: Mapping[str, Route] = field(default_factory=dict)
    cloud_fallback: bool = True
    failures: tuple[Failure, ...] = ()
    settings: Settings = field(default_factory=Settings)
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    delays: Delays = Delays()
    duration_seconds: float = 600.0
    """When the last request arrives at the latest."""
    max_requests: int = 1_000_000
    seed: int = 1
    description: str = ""

    def at_load(self, factor: float) -> "Scenario":
        """The same with so many times as many requests."""
        traffic = tuple(
            replace(each, rate=replace(each.rate, per_second=each.rate.per_second * factor)) for each in self.traffic
        )
        return replace(self, traffic=traffic)
