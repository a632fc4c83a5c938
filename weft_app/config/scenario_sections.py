"""The parts of a scenario file. Unknown names are refused, and every number has a bound."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from router_svc.policy.endpoints.routes import Route
from router_svc.policy.limits import SchedulerLimits
from router_svc.simulation.scenario import (
    GIBIBYTE,
    Amount,
    Delays,
    Failure,
    FailureMode,
    HostGroup,
    ModelKind,
    Pattern,
    Rate,
    Traffic,
)
from weft.kernel.request import Skill
from weft_app.config.config_section import Name, Section

MAX_HOSTS = 100_000

Positive = Annotated[float, Field(gt=0, le=1e9)]
Moment = Annotated[float, Field(ge=0, le=86_400 * 366)]
"""Seconds from the beginning."""
Duration = Annotated[float, Field(gt=0, le=86_400 * 366)]
"""Seconds."""
Gibibytes = Annotated[float, Field(ge=0, le=65_536)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Limit = Annotated[int, Field(ge=0, le=1_000_000)]
"""0: none."""
Target = Annotated[str, Field(min_length=1, max_length=256)]
Band = Literal["system", "high", "normal", "low", "durable"]
SkillName = Literal["text", "image", "audio", "tools"]


_LIMITS = SchedulerLimits()
_DELAYS = Delays()


class AmountSection(Section):
    """An amount that varies: log-normal around its mean."""

    mean: Positive
    """Its mean."""
    variation: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Standard deviation over mean."""
    min: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """No value is lower."""
    max: Positive | None = None
    """No value is higher. Default: the mean and five standard deviations."""

    def amount(self) -> Amount:
        """As the simulation has it."""
        highest = self.mean * (1 + 5 * self.variation) if self.max is None else self.max
        return Amount(mean=self.mean, variation=self.variation, lowest=self.min, highest=highest)


Amounts = Annotated[float, Field(gt=0, le=1e9)] | AmountSection
"""A number, or a mean and how it varies."""


class HostSection(Section):
    """Hosts of one kind."""

    name: Name
    """What they are called; several get a number: `lab-1`."""
    count: Annotated[int, Field(ge=1, le=MAX_HOSTS)] = 1
    """How many there are."""
    memory_gib: Gibibytes = 0.0
    """Accelerator memory of each. 0: not booked; then everything fits."""
    program_gib: Gibibytes = 0.0
    """Of it, what a program that is no model holds all the time."""
    max_requests: Limit = 0
    """Requests that its runner works on at once. 0: as many as its models have slots."""

    def group(self) -> HostGroup:
        """As the simulation has it."""
        return HostGroup(
            name=self.name,
            count=self.count,
            memory_bytes=round(self.memory_gib * GIBIBYTE),
            program_bytes=round(self.program_gib * GIBIBYTE),
            max_requests=self.max_requests,
        )


class ModelSection(Section):
    """A model, and where it is."""

    name: Name
    """Its name, and its pool's where several hosts have it."""
    hosts: tuple[Name, ...] = Field(default=(), max_length=1000, strict=False)
    """Hosts or kinds of hosts. Default: all."""
    memory_gib: Gibibytes = 0.0
    """What it takes while it is loaded."""
    load_seconds: Amounts = 10.0
    """How long a load takes."""
    slots: Annotated[int, Field(ge=1, le=10_000)] = 4
    """Requests that it works on at once, on each host."""
    prefill_tokens_per_second: Positive = 2000.0
    """How fast a slot reads a prompt while all are busy."""
    decode_tokens_per_second: Positive = 40.0
    """How fast a slot answers while all are busy."""
    context_tokens: Annotated[int, Field(ge=0, le=100_000_000)] = 0
    """Context of a slot. 0: unknown."""
    skills: tuple[SkillName, ...] | None = Field(default=None, max_length=16, strict=False)
    """What it can do. Default: unknown."""
    remote: bool = False
    """Whether it runs off the premises: always loaded, on no host."""
    loaded: bool = False
    """Whether it is loaded at the beginning."""
    pinned: bool = False
    """Whether it gives way to no other."""
    keep_alive_seconds: Moment | None = None
    """How long it stays loaded unused. Default: until its memory is needed."""
    policy: Literal["least_loaded", "random", "round_robin", "prefix_affinity"] = "least_loaded"
    """How one of several hosts is chosen."""
    max_in_flight: Limit = 0
    """Requests at once over all hosts. 0: no limit."""

    @model_validator(mode="after")
    def _remote_has_no_host(self) -> "ModelSection":
        if self.remote and (self.hosts or self.memory_gib):
            raise ValueError("a model off the premises has no hosts and no memory_gib")
        return self

    def kind(self) -> ModelKind:
        """As the simulation has it."""
        return ModelKind(
            name=self.name,
            hosts=self.hosts,
            memory_bytes=round(self.memory_gib * GIBIBYTE),
            load_seconds=_amount(self.load_seconds),
            slots=self.slots,
            prefill_tokens_per_second=self.prefill_tokens_per_second,
            decode_tokens_per_second=self.decode_tokens_per_second,
            context_tokens=self.context_tokens,
            skills=None if self.skills is None else _skills(self.skills),
            remote=self.remote,
            loaded=self.loaded,
            pinned=self.pinned,
            keep_alive_seconds=self.keep_alive_seconds,
        )


class TenantSection(Section):
    """Who asks."""

    name: Name
    """Its name."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Its share of what is scarce, against the others'."""
    max_in_flight: Limit = 0
    """Its requests that may run at once. 0: no limit."""
    allow_remote: Literal["never", "on_request", "always"] = "on_request"
    """Whether its requests may leave the premises."""
    priorities: dict[Band, Annotated[float, Field(ge=0, le=1000)]] = Field(default={"normal": 1.0}, max_length=5)
    """How its requests are divided over the bands: `{high: 1, low: 3}`. Those of `durable` are tasks that wait as long
    as it takes; a router takes them from its database a few at a time, and here all of them are before it at once."""

    @model_validator(mode="after")
    def _some_priority(self) -> "TenantSection":
        if not any(self.priorities.values()):
            raise ValueError("priorities: one must be more than 0")
        return self


class RateSection(Section):
    """How often."""

    per_second: Annotated[float, Field(gt=0, le=1_000_000)]
    """Requests in a second: the mean, or what it is between bursts. Of a day whose `factor` is more than 2 the mean is
    a little higher, since a night has no fewer than none."""
    pattern: Literal["poisson", "constant", "burst", "diurnal"] = "poisson"
    """How they are spread."""
    factor: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """How many times as many come in a burst, or at the top of the day."""
    period_seconds: Duration = 60.0
    """From burst to burst, or the length of a day."""
    high_seconds: Duration = 10.0
    """How long a burst lasts."""


class ArrivalsSection(Section):
    """Requests of one tenant for one target."""

    tenant: Name
    """Who asks."""
    target: Target
    """A model, or `route/` and a route."""
    rate: Annotated[float, Field(gt=0, le=1_000_000)] | RateSection
    """Requests in a second, or how they are spread."""
    prompt_tokens: Amounts = AmountSection(mean=400.0, variation=1.0, min=1.0)
    """Length of prompts."""
    output_tokens: Amounts = AmountSection(mean=200.0, variation=1.0, min=1.0)
    """Length of answers."""
    max_output_tokens: Count | None = None
    """What requests say at most; longer answers are cut off."""
    deadline_seconds: Duration | None = None
    """From the arrival to the end. Default: none."""
    patience_seconds: Duration | None = None
    """When callers go that have seen nothing. Default: they wait."""
    allow_remote: bool = False
    """Whether requests may leave the premises."""
    skills: tuple[SkillName, ...] = Field(default=(), max_length=16, strict=False)
    """What they need besides text."""
    sessions: Limit = 0
    """Conversations at a time. 0: each request stands alone."""
    session_cached_share: Annotated[float, Field(ge=0, le=1)] = 0.8
    """Of a prompt, what the last turn of its conversation left in the cache."""
    session_affinity: bool = False
    """Whether requests name their conversation."""
    from_seconds: Moment = 0.0
    """When the first one may come."""
    until_seconds: Duration | None = None
    """When no more come. Default: at the end."""

    def traffic(self) -> Traffic:
        """As the simulation has it."""
        rate = self.rate if isinstance(self.rate, RateSection) else RateSection(per_second=self.rate)
        return Traffic(
            tenant=self.tenant,
            target=self.target,
            rate=Rate(
                per_second=rate.per_second,
                pattern=Pattern(rate.pattern),
                factor=rate.factor,
                period_seconds=rate.period_seconds,
                high_seconds=rate.high_seconds,
            ),
            prompt_tokens=_amount(self.prompt_tokens),
            output_tokens=_amount(self.output_tokens),
            max_output_tokens=self.max_output_tokens,
            deadline_seconds=self.deadline_seconds,
            patience_seconds=self.patience_seconds,
            allow_remote=self.allow_remote,
            skills=_skills(self.skills),
            sessions=self.sessions,
            session_cached_share=self.session_cached_share,
            session_affinity=self.session_affinity,
            from_seconds=self.from_seconds,
            until_seconds=self.until_seconds,
        )


class RouteSection(Section):
    """A ladder of models."""

    name: Name
    """Its name; requests ask for `route/` and it."""
    candidates: tuple[Target, ...] = Field(min_length=1, max_length=64, strict=False)
    """Models, best first."""
    budget_seconds: Duration | None = None
    """From the arrival to the end. Default: none."""
    keep_alive_seconds: Annotated[float, Field(ge=-1, le=86_400 * 366)] | None = None
    """How long its models stay loaded unused. -1: for ever."""
    pin_primary: bool = False
    """Whether the first is waited for."""

    def route(self) -> Route:
        """As the simulation has it."""
        return Route(**self.model_dump())


class FailureSection(Section):
    """Something that goes wrong."""

    mode: Literal["dies", "breaks", "slow"]
    """The runner is gone; attempts fail; everything takes longer."""
    hosts: tuple[Name, ...] = Field(default=(), max_length=1000, strict=False)
    """Where: hosts or kinds of hosts; what runs off the premises is on a host of its own name. Default: everywhere."""
    at_seconds: Moment
    """When it begins."""
    for_seconds: Duration
    """How long it lasts."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of the attempts, how many break."""
    factor: Annotated[float, Field(ge=1, le=1000)] = 2.0
    """How many times as long everything takes."""

    def failure(self) -> Failure:
        """As the simulation has it."""
        return Failure(**self.model_dump() | {"mode": FailureMode(self.mode)})


class RouterLimitsSection(Section):
    """Bounds of the router that differ from its defaults; those of `router` in weft.yaml mean the same."""

    queue_depth_per_runner: Limit = _LIMITS.queue_depth_per_runner
    """Requests that may wait, per runner."""
    queue_timeout_seconds: Duration = _LIMITS.queue_timeout_seconds
    """Longest wait for a slot."""
    max_attempts: Annotated[int, Field(ge=1, le=10)] = _LIMITS.max_attempts
    """Attempts before any content."""
    max_cold_wait_seconds: Duration = _LIMITS.max_cold_wait_seconds
    """When others give way for a model that is not loaded, whatever that costs."""
    durable_share: Annotated[float, Field(ge=0, le=0.5)] = _LIMITS.durable_share
    """Share of a pool's requests that are durable tasks while others wait too."""
    max_durable_waiting: Annotated[int, Field(ge=1, le=20_000_000)] = _LIMITS.max_durable_waiting
    """Durable tasks that wait at once; further ones are refused, which a router's own never come to."""
    min_turn_seconds: Duration = _LIMITS.min_turn_seconds
    """How long a model that was loaded serves at least."""
    swap_quantum_ratio: Annotated[float, Field(gt=0, le=1000)] = _LIMITS.swap_quantum_ratio
    """How many times as long as its load a model serves at least."""


class DelaysSection(Section):
    """How long news take."""

    report_seconds: Annotated[float, Field(ge=0, le=60)] = _DELAYS.report_seconds
    """Until the router hears of a change on a host."""
    death_noticed_seconds: Annotated[float, Field(ge=0, le=600)] = _DELAYS.death_noticed_seconds
    """Until it hears that a runner is gone."""
    failure_seconds: Annotated[float, Field(ge=0, le=60)] = _DELAYS.failure_seconds
    """Until a failed attempt is known to have failed."""
    unload_seconds: Annotated[float, Field(ge=0, le=60)] = _DELAYS.unload_seconds
    """Until the memory of a model that gives way is free."""
    memory_watch_seconds: Annotated[float, Field(gt=0, le=60)] = _DELAYS.memory_watch_seconds
    """How often the router looks at the book of memory."""


def _amount(value: float | AmountSection) -> Amount:
    return value.amount() if isinstance(value, AmountSection) else Amount(mean=value, highest=value)


def _skills(names: tuple[SkillName, ...]) -> frozenset[Skill]:
    return frozenset(Skill[name.upper()] for name in names)
