"""A scenario: hosts, models, tenants, traffic and failures. Times are seconds from its beginning.

All chance in a run comes from `seeded_random`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from random import Random
from typing import Annotated

from annotated_types import Ge, Gt, Le, MaxLen

from router_svc.policy.endpoints.routes import MAX_SECONDS, Route
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.request import MEDIA_UNITS
from router_svc.policy.settings import Settings
from weft.kernel.names import ROUTE_PREFIX
from weft.kernel.request import Operation, Priority, Skill
from weft.kernel.settings import Name


def seeded_random(seed: int, purpose: str) -> Random:
    """Returns the random source of a purpose: drawing more for one changes nothing for another."""
    return Random(f"{seed}/{purpose}")  # noqa: S311 - a simulation, nothing secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """A log-normal distribution around a mean, as lengths and times of language models have it."""

    mean: float
    variation: float = 0.0
    """Standard deviation divided by the mean; 0: always the mean."""
    lowest: float = 0.0
    highest: float = math.inf

    def draw(self, random: Random) -> float:
        """Draws one value."""
        if not self.variation or not self.mean:
            return min(max(self.mean, self.lowest), self.highest)
        sigma_squared = math.log1p(self.variation**2)
        value = random.lognormvariate(math.log(self.mean) - sigma_squared / 2, math.sqrt(sigma_squared))
        return min(max(value, self.lowest), self.highest)

    def draw_count(self, random: Random) -> int:
        """Draws one value as an integer."""
        return round(self.draw(random))

    @property
    def largest_likely(self) -> float:
        """A bound that nearly all values stay under: five standard deviations above the mean, or `highest`."""
        return min(self.mean * (1 + 5 * self.variation), self.highest)


GIBIBYTE = 1024**3
BLOCK_TOKENS = 512
"""Tokens per block of a traced prompt."""
USUAL_LOAD_SECONDS = Amount(mean=10.0)
USUAL_PROMPT_TOKENS = Amount(mean=400.0, variation=1.0, lowest=1.0, highest=100_000.0)
USUAL_OUTPUT_TOKENS = Amount(mean=200.0, variation=1.0, lowest=1.0, highest=100_000.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """Hosts of one kind, each with one runner of the host's name."""

    name: str
    count: int = 1
    """A single host has the name of the group, several have it with a number: `lab-1`."""
    memory_bytes: int = 0
    """Accelerator memory that may be reserved; 0: none."""
    program_bytes: int = 0
    """Part of it that a program holds all the time."""
    unowned_bytes: int = 0
    """Part of it that is held all the time by a model that is not in the mesh any more."""
    max_requests: int = 0
    """Concurrent requests of its runner over all models; 0: as many as there are slots."""
    engine_requests: int = 0
    """Requests that an engine on it computes concurrently, as many as its KV cache has room for; more wait in the
    engine. 0: as many as it has slots, and the engine reports no figures."""
    figures_until_seconds: float = math.inf
    """When the figures of its engines cease to arrive."""

    def host_names(self) -> tuple[str, ...]:
        """Returns the names of its hosts."""
        if self.count == 1:
            return (self.name,)
        return tuple(f"{self.name}-{number}" for number in range(1, self.count + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """A model, on one host or several."""

    name: str
    """Name of its pool. On one host it is also the name of the model, on several with a number: `qwen-1`."""
    hosts: tuple[str, ...] = ()
    """Hosts or groups of hosts that have it; empty: all. A remote model has none."""
    memory_bytes: int = 0
    load_seconds: Amount = USUAL_LOAD_SECONDS
    slots: int = 4
    prefill_tokens_per_second: float = 2000.0
    """In each slot, while all are busy."""
    decode_tokens_per_second: float = 40.0
    """In each slot, while all are busy."""
    operation: Operation = Operation.CHAT
    """What it does."""
    work_per_second: float = 1.0
    """Of a model of media: units of work in each slot, while all are busy, such as steps of a megapixel."""
    context_tokens: int = 0
    """0: unknown."""
    cache_tokens: int = 0
    """Prompt tokens that the prefix cache of each engine keeps. Such an engine processes one prompt at a time. 0: only
    `Traffic.sessions` are cached."""
    skills: frozenset[Skill] | None = None
    """None: unknown."""
    remote: bool = False
    """Whether it is remote: it takes no memory and is always loaded."""
    loaded: bool = False
    """Whether it is loaded at the beginning, if there is room."""
    pinned: bool = False
    keep_alive_seconds: float | None = None
    """How long it stays loaded without a request; None: until its memory is needed."""

    @property
    def is_media(self) -> bool:
        """Whether the work on its requests is known when they arrive."""
        return self.operation in MEDIA_UNITS

    def prefill_seconds(self, fresh_tokens: float) -> float:
        """Returns the time to the first content in a slot, while all are busy."""
        return 0.0 if self.is_media else fresh_tokens / self.prefill_tokens_per_second

    def answer_seconds(self, output_tokens: float, work: float) -> float:
        """Returns the time from there to the end; of media all of it."""
        return work / self.work_per_second if self.is_media else output_tokens / self.decode_tokens_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A tenant. Weight, cap and permission are in the settings."""

    name: str
    bands: Mapping[Priority, float] = field(default_factory=lambda: {Priority.NORMAL: 1.0})
    """How its requests are divided over the priority classes."""


class Pattern(Enum):
    """How arrivals are distributed over time."""

    POISSON = "poisson"
    CONSTANT = "constant"
    """Evenly spaced."""
    BURST = "burst"
    """Poisson, and `factor` times as many for `high_seconds` at the beginning of each `period_seconds`."""
    DIURNAL = "diurnal"
    """Poisson with a sine-shaped rate, `factor` times the mean at its peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The rate of arrivals."""

    per_second: Annotated[float, Gt(0), Le(1_000_000)]
    """Requests per second: the mean, or the rate between bursts. With DIURNAL and a `factor` above 2 the mean is a
    little higher, because the rate at night is cut off at 0."""
    pattern: Pattern = Pattern.POISSON
    """Distribution over time."""
    factor: Annotated[float, Ge(1), Le(1000)] = 1.0
    """Factor of the rate in a burst, or at the peak of the day."""
    period_seconds: Annotated[float, Gt(0), Le(MAX_SECONDS)] = 60.0
    """From burst to burst, or the length of a day."""
    high_seconds: Annotated[float, Gt(0), Le(MAX_SECONDS)] = 10.0
    """How long a burst lasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """A recorded request."""

    at_seconds: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """One id for every BLOCK_TOKENS of the prompt; equal ids have everything before them in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests of one tenant for one target."""

    tenant: str
    target: str
    """A model or a pool; or `route/` and a route."""
    rate: Rate | None = None
    """None: those of `trace`."""
    trace: tuple[TracedRequest, ...] = ()
    """Requests with their prompts' beginnings and lengths, by time."""
    prompt_tokens: Amount = USUAL_PROMPT_TOKENS
    output_tokens: Amount = USUAL_OUTPUT_TOKENS
    work: Amount | None = None
    """Of requests for media: their work, such as steps times megapixels; None: they are for text."""
    max_output_tokens: int | None = None
    """The limit that requests state; longer answers are cut there."""
    deadline_seconds: float | None = None
    """From its arrival to its end; None: none."""
    patience_seconds: float | None = None
    """Callers without any content by then disconnect; None: they wait."""
    allow_remote: bool = False
    """Whether requests allow remote models; the tenant's settings must permit it too."""
    skills: frozenset[Skill] = frozenset()
    sessions: int = 0
    """Concurrent conversations that the requests are divided over; 0: every request is independent."""
    session_cached_share: float = 0.8
    """Share of a prompt that is cached on the model that served the last turn of its conversation."""
    session_affinity: bool = False
    """Whether requests name their conversation; otherwise only their prompt prefixes show it."""
    from_seconds: float = 0.0
    until_seconds: float | None = None
    """None: to the end."""

    def at_load(self, factor: float) -> "Traffic":
        """Returns it with its rate multiplied by `factor`."""
        rate = None if self.rate is None else replace(self.rate, per_second=self.rate.per_second * factor)
        trace = tuple(replace(each, at_seconds=each.at_seconds / factor) for each in self.trace)
        return replace(self, rate=rate, trace=trace)


class FailureMode(Enum):
    """The kind of a failure on a host."""

    DIES = "dies"
    """The runner dies with all its requests, and returns with nothing loaded."""
    BREAKS = "breaks"
    """A share of the attempts fails before any content."""
    SLOW = "slow"
    """Everything takes `factor` times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A temporary failure."""

    mode: FailureMode
    hosts: Annotated[tuple[Name, ...], MaxLen(1000)] = ()
    """Hosts or groups; empty: all. A remote model is on a host with its name."""
    at_seconds: Annotated[float, Ge(0), Le(MAX_SECONDS)]
    """When it begins."""
    for_seconds: Annotated[float, Gt(0), Le(MAX_SECONDS)]
    """How long it lasts."""
    share: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of attempts that break."""
    factor: Annotated[float, Ge(1), Le(1000)] = 2.0
    """Slow-down factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """Delays of reports and reactions."""

    report_seconds: Annotated[float, Ge(0), Le(60)] = 0.1
    """From a change on a host to its report at the router."""
    death_noticed_seconds: Annotated[float, Ge(0), Le(600)] = 1.0
    """From the death of a runner to its detection by the router."""
    failure_seconds: Annotated[float, Ge(0), Le(60)] = 0.05
    """From a grant to the detection of a failed attempt."""
    unload_seconds: Annotated[float, Ge(0), Le(60)] = 0.5
    """From an eviction until the memory is seen free."""
    memory_watch_seconds: Annotated[float, Gt(0), Le(60)] = 0.5
    """Interval at which the router reads the VRAM ledger."""
    engine_figures_seconds: Annotated[float, Gt(0), Le(600)] = 5.0
    """Interval at which the figures of engines are sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A complete scenario."""

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
    """Latest arrival of a request."""
    max_requests: int = 1_000_000
    seed: int = 1
    description: str = ""

    def kind_of(self, target: str) -> ModelKind | None:
        """Returns the model of a target, of a route its first one; None: it names none."""
        route = self.routes.get(target.removeprefix(ROUTE_PREFIX)) if target.startswith(ROUTE_PREFIX) else None
        name = target if route is None else route.candidates[0]
        return next((kind for kind in self.models if kind.name == name), None)

    def at_load(self, factor: float) -> "Scenario":
        """Returns the scenario with its request rates multiplied by `factor`."""
        return replace(self, traffic=tuple(each.at_load(factor) for each in self.traffic))
