"""A scenario: hosts, models, tenants, traffic and failures. Times are seconds from its beginning.

`scenario_file` reads these records from scenario files. All chance in a run comes from `seeded_random`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from random import Random
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, MaxLen, MinLen

from router_svc.policy.endpoints.routes import MAX_SECONDS, Route
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.pool_settings import Settings
from router_svc.policy.router_request import MEDIA_UNITS
from weft.kernel.requests.request_values import Operation, Priority, Skill
from weft.kernel.settings.setting_annotations import Constant, Name, Read
from weft.kernel.values.names import ROUTE_PREFIX


def seeded_random(seed: int, purpose: str) -> Random:
    """Returns the random source of a purpose: drawing more for one changes nothing for another."""
    return Random(f"{seed}/{purpose}")  # noqa: S311 - a simulation, nothing secret


MAX_HOSTS = 100_000
Positive = Annotated[float, Gt(0), Le(1e9)]
Moment = Annotated[float, Ge(0), Le(MAX_SECONDS)]
"""Seconds from the beginning."""
Duration = Annotated[float, Gt(0), Le(MAX_SECONDS)]
"""Seconds."""
Gibibytes = Annotated[float, Ge(0), Le(65_536)]
Count = Annotated[int, Ge(1), Le(1_000_000)]
Limit = Annotated[int, Ge(0), Le(1_000_000)]
"""0: none."""
Target = Annotated[str, MinLen(1), MaxLen(256)]
HostNames = Annotated[tuple[Name, ...], MaxLen(1000)]


def _skills_of(names: tuple[str, ...]) -> frozenset[Skill]:
    return frozenset(Skill[name.upper()] for name in names)


SkillNames = Annotated[tuple[Literal["text", "image", "audio", "tools"], ...], MaxLen(16)]
Skills = Annotated[frozenset[Skill], Read(SkillNames, _skills_of)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """A log-normal distribution around a mean, as lengths and times of language models have it."""

    mean: Positive
    """Its mean."""
    variation: Annotated[float, Ge(0), Le(10)] = 0.0
    """Standard deviation divided by the mean; 0: always the mean."""
    min: Annotated[float, Ge(0), Le(1e9)] = 0.0
    """No value is lower."""
    max: Positive | None = None
    """No value is higher. Default: the mean and five standard deviations."""

    def draw(self, random: Random) -> float:
        """Draws one value."""
        if not self.variation:
            return self._within_bounds(self.mean)
        sigma_squared = math.log1p(self.variation**2)
        value = random.lognormvariate(math.log(self.mean) - sigma_squared / 2, math.sqrt(sigma_squared))
        return self._within_bounds(value)

    def draw_count(self, random: Random) -> int:
        """Draws one value as an integer."""
        return round(self.draw(random))

    @property
    def largest_likely(self) -> float:
        """A bound that nearly all values stay under: five standard deviations above the mean, or `max`."""
        usual = self.mean * (1 + 5 * self.variation)
        return usual if self.max is None else min(usual, self.max)

    def _within_bounds(self, value: float) -> float:
        highest = self.mean * (1 + 5 * self.variation) if self.max is None else self.max
        return min(max(value, self.min), highest)


def _amount_of(written: float | Amount) -> Amount:
    return written if isinstance(written, Amount) else Amount(mean=written)


Amounts = Annotated[Amount, Read(Positive | Amount, _amount_of)]
"""In a file also a number."""
GIBIBYTE = 1024**3
BLOCK_TOKENS = 512
"""Tokens per block of a traced prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """Hosts of one kind, each with one runner of the host's name."""

    name: Name
    """Their name; several get a number: `lab-1`."""
    count: Annotated[int, Ge(1), Le(MAX_HOSTS)] = 1
    """Number of hosts."""
    memory_gib: Gibibytes = 0.0
    """Accelerator memory of each. 0: not tracked; then everything fits."""
    program_gib: Gibibytes = 0.0
    """Part of it that a program other than a model holds permanently."""
    unowned_gib: Constant[float] = 0.0
    """Part of it that is held permanently by a model that is no longer in the mesh."""
    max_requests: Limit = 0
    """Concurrent requests of its runner. 0: as many as its models have slots."""
    engine_requests: Limit = 0
    """Requests that each engine computes concurrently, as many as its KV cache has room for; more wait in it, and it
    reports figures of its load. 0: as many as its models have slots, without figures."""
    figures_until_seconds: Duration | None = None
    """When the figures of its engines cease to arrive. Default: never."""

    def host_names(self) -> tuple[str, ...]:
        """Returns the names of its hosts."""
        if self.count == 1:
            return (self.name,)
        return tuple(f"{self.name}-{number}" for number in range(1, self.count + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """A model, on one host or several."""

    name: Name
    """Its name, and the name of its pool if several hosts have it: there it has a number, as in `qwen-1`."""
    hosts: HostNames = ()
    """Hosts or groups of hosts that have it. Default: all. A remote model has none."""
    memory_gib: Gibibytes = 0.0
    """Memory while it is loaded."""
    load_seconds: Amounts = Amount(mean=10.0)
    """Duration of a load."""
    slots: Annotated[int, Ge(1), Le(10_000)] = 4
    """Concurrent requests on each host."""
    prefill_tokens_per_second: Positive = 2000.0
    """Prompt speed of an engine, which processes one prompt after the other, while all slots are busy; a remote model
    processes each at this speed."""
    decode_tokens_per_second: Positive = 40.0
    """Output speed of one slot while all are busy."""
    operation: Annotated[
        Operation, Read(Literal["chat", "image", "transcription", "speech"], lambda name: Operation[name.upper()])
    ] = Operation.CHAT
    """Its operation."""
    work_per_second: Positive = 1.0
    """Speed of one slot while all are busy: steps of a megapixel, seconds of audio, or characters, by the operation."""
    context_tokens: Annotated[int, Ge(0), Le(100_000_000)] = 0
    """Context of a slot. 0: unknown."""
    cache_tokens: Annotated[int, Ge(0), Le(1_000_000_000)] = 0
    """Prompt tokens that the prefix cache of each host keeps. 0: only `Traffic.sessions` are cached."""
    skills: Skills | None = None
    """Its skills. Default: unknown."""
    remote: bool = False
    """Whether it is remote: always loaded, on no host."""
    loaded: bool = False
    """Whether it is loaded at the beginning, if there is room."""
    pinned: bool = False
    """Whether it is never evicted."""
    keep_alive_seconds: Moment | None = None
    """How long it stays loaded while idle. Default: until its memory is needed."""

    @property
    def memory_bytes(self) -> int:
        """Memory while it is loaded."""
        return round(self.memory_gib * GIBIBYTE)

    @property
    def is_media(self) -> bool:
        """Whether the work on its requests is known when they arrive."""
        return self.operation in MEDIA_UNITS

    def prefill_seconds(self, fresh_tokens: float) -> float:
        """Returns how long an engine processes a prompt, while all slots are busy."""
        return 0.0 if self.is_media else fresh_tokens / self.prefill_tokens_per_second

    def answer_seconds(self, output_tokens: float, work: float) -> float:
        """Returns the time from there to the end; of media all of it."""
        return work / self.work_per_second if self.is_media else output_tokens / self.decode_tokens_per_second


def _priorities_of(shares: Mapping[str, float]) -> dict[Priority, float]:
    found = {Priority[name.upper()]: share for name, share in shares.items() if share}
    if not found:
        raise ValueError("one must be more than 0")
    return found


_Shares = Annotated[
    Mapping[Literal["system", "high", "normal", "low", "durable"], Annotated[float, Ge(0), Le(1000)]], MaxLen(5)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A tenant. Weight, cap and permission are in the settings."""

    name: Name
    """Its name."""
    priorities: Annotated[Mapping[Priority, float], Read(_Shares, _priorities_of)] = field(
        default_factory=lambda: {Priority.NORMAL: 1.0}
    )
    """How its requests are divided over the priority classes: `{high: 1, low: 3}`. Those of `durable` are tasks without
    a queue timeout; a router offers them from its database a few at a time, here all are offered together."""


class Pattern(Enum):
    """How arrivals are distributed over time."""

    POISSON = "poisson"
    CONSTANT = "constant"
    """Evenly spaced."""
    BURST = "burst"
    """Poisson, and `factor` times as many for `high_seconds` at the beginning of each `period_seconds`."""
    DIURNAL = "diurnal"
    """Poisson with a sine-shaped rate, `factor` times the mean at its peak."""


_PerSecond = Annotated[float, Gt(0), Le(1_000_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The rate of arrivals."""

    per_second: _PerSecond
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


def _rate_of(written: float | Rate | None) -> Rate | None:
    return Rate(per_second=written) if isinstance(written, float | int) else written


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

    tenant: Name
    """The tenant."""
    target: Target
    """A model, or `route/` and a route."""
    rate: Annotated[Rate | None, Read(_PerSecond | Rate | None, _rate_of)] = None
    """Requests per second, or a rate with its distribution."""
    trace: Annotated[str, MaxLen(4096)] = ""
    """File of recorded requests instead of a rate, relative to this file: JSON lines with `timestamp` in ms,
    `input_length`, `output_length`, and `hash_ids` of blocks of 512 tokens, as in Mooncake's traces."""
    recorded: Constant[tuple[TracedRequest, ...]] = ()
    """The requests of `trace`, by time."""
    prompt_tokens: Amounts = Amount(mean=400.0, variation=1.0, min=1.0)
    """Length of prompts."""
    output_tokens: Amounts = Amount(mean=200.0, variation=1.0, min=1.0)
    """Length of answers."""
    work: Amounts | None = None
    """Work of a request for media: steps times megapixels, seconds of audio, or characters. Default: it is for text."""
    max_output_tokens: Count | None = None
    """The limit that requests state; longer answers are cut."""
    deadline_seconds: Duration | None = None
    """From the arrival to the end. Default: none."""
    patience_seconds: Duration | None = None
    """When callers without any content disconnect. Default: they wait."""
    allow_remote: bool = False
    """Whether requests allow remote models; the tenant's settings must permit it too."""
    skills: Skills = frozenset()
    """Skills that they need besides text."""
    sessions: Limit = 0
    """Concurrent conversations that the requests are divided over. 0: every request is independent."""
    session_cached_share: Annotated[float, Ge(0), Le(1)] = 0.8
    """Share of a prompt that is cached on the model that served the last turn of its conversation."""
    session_affinity: bool = False
    """Whether requests name their conversation; otherwise only their prompt prefixes show it."""
    from_seconds: Moment = 0.0
    """When arrivals begin."""
    until_seconds: Duration | None = None
    """When arrivals end. Default: at the end."""

    def __post_init__(self) -> None:
        if (self.rate is None) is not bool(self.trace or self.recorded):
            raise ValueError("either rate or trace is required")

    def at_load(self, factor: float) -> "Traffic":
        """Returns it with its rate multiplied by `factor`."""
        rate = None if self.rate is None else replace(self.rate, per_second=self.rate.per_second * factor)
        recorded = tuple(replace(each, at_seconds=each.at_seconds / factor) for each in self.recorded)
        return replace(self, rate=rate, recorded=recorded)


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
    hosts: HostNames = ()
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
