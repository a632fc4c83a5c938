"""The sections of a scenario file. Unknown names are refused, and every number has a range."""

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
from weft_app.config.section import Name, Section

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
    """A log-normal distribution around a mean."""

    mean: Positive
    """Its mean."""
    variation: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Standard deviation over mean."""
    min: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """No value is lower."""
    max: Positive | None = None
    """No value is higher. Default: the mean and five standard deviations."""

    def amount(self) -> Amount:
        """Returns the value for the simulation."""
        highest = self.mean * (1 + 5 * self.variation) if self.max is None else self.max
        return Amount(mean=self.mean, variation=self.variation, lowest=self.min, highest=highest)


Amounts = Annotated[float, Field(gt=0, le=1e9)] | AmountSection
"""A number, or a distribution."""


class HostSection(Section):
    """Hosts of one kind."""

    name: Name
    """Their name; several get a number: `lab-1`."""
    count: Annotated[int, Field(ge=1, le=MAX_HOSTS)] = 1
    """Number of hosts."""
    memory_gib: Gibibytes = 0.0
    """Accelerator memory of each. 0: not tracked; then everything fits."""
    program_gib: Gibibytes = 0.0
    """Part of it that a program other than a model holds all the time."""
    max_requests: Limit = 0
    """Concurrent requests of its runner. 0: as many as its models have slots."""

    def group(self) -> HostGroup:
        """Returns the value for the simulation."""
        return HostGroup(
            name=self.name,
            count=self.count,
            memory_bytes=round(self.memory_gib * GIBIBYTE),
            program_bytes=round(self.program_gib * GIBIBYTE),
            max_requests=self.max_requests,
        )


class ModelSection(Section):
    """A model and its hosts."""

    name: Name
    """Its name, and the name of its pool if several hosts have it."""
    hosts: tuple[Name, ...] = Field(default=(), max_length=1000, strict=False)
    """Hosts or host sections. Default: all."""
    memory_gib: Gibibytes = 0.0
    """Memory while it is loaded."""
    load_seconds: Amounts = 10.0
    """Duration of a load."""
    slots: Annotated[int, Field(ge=1, le=10_000)] = 4
    """Concurrent requests on each host."""
    prefill_tokens_per_second: Positive = 2000.0
    """Prompt speed of one slot while all are busy."""
    decode_tokens_per_second: Positive = 40.0
    """Output speed of one slot while all are busy."""
    context_tokens: Annotated[int, Field(ge=0, le=100_000_000)] = 0
    """Context of a slot. 0: unknown."""
    skills: tuple[SkillName, ...] | None = Field(default=None, max_length=16, strict=False)
    """Its skills. Default: unknown."""
    remote: bool = False
    """Whether it is remote: always loaded, on no host."""
    loaded: bool = False
    """Whether it is loaded at the beginning."""
    pinned: bool = False
    """Whether it is never evicted."""
    keep_alive_seconds: Moment | None = None
    """How long it stays loaded while idle. Default: until its memory is needed."""
    policy: Literal["least_loaded", "random", "round_robin", "prefix_affinity"] = "least_loaded"
    """Policy that selects one of several hosts."""
    max_in_flight: Limit = 0
    """Concurrent requests over all hosts. 0: no limit."""

    @model_validator(mode="after")
    def _remote_has_no_host(self) -> "ModelSection":
        if self.remote and (self.hosts or self.memory_gib):
            raise ValueError("a model off the premises has no hosts and no memory_gib")
        return self

    def kind(self) -> ModelKind:
        """Returns the value for the simulation."""
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
    """A tenant."""

    name: Name
    """Its name."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Its share of scarce capacity, relative to the others."""
    max_in_flight: Limit = 0
    """Its concurrent requests. 0: no limit."""
    allow_remote: Literal["never", "on_request", "always"] = "on_request"
    """Whether its requests may use remote models."""
    priorities: dict[Band, Annotated[float, Field(ge=0, le=1000)]] = Field(default={"normal": 1.0}, max_length=5)
    """How its requests are divided over the priority classes: `{high: 1, low: 3}`. Those of `durable` are tasks without
    a queue timeout; a router offers them from its database a few at a time, here all are offered at once."""

    @model_validator(mode="after")
    def _some_priority(self) -> "TenantSection":
        if not any(self.priorities.values()):
            raise ValueError("priorities: one must be more than 0")
        return self


class RateSection(Section):
    """A rate of arrivals."""

    per_second: Annotated[float, Field(gt=0, le=1_000_000)]
    """Requests per second: the mean, or the rate between bursts. With `diurnal` and a `factor` above 2 the mean is a
    little higher, because the rate at night is cut off at 0."""
    pattern: Literal["poisson", "constant", "burst", "diurnal"] = "poisson"
    """Distribution over time."""
    factor: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """Factor of the rate in a burst, or at the peak of the day."""
    period_seconds: Duration = 60.0
    """From burst to burst, or the length of a day."""
    high_seconds: Duration = 10.0
    """How long a burst lasts."""


class ArrivalsSection(Section):
    """Requests of one tenant for one target."""

    tenant: Name
    """The tenant."""
    target: Target
    """A model, or `route/` and a route."""
    rate: Annotated[float, Field(gt=0, le=1_000_000)] | RateSection
    """Requests per second, or a rate with its distribution."""
    prompt_tokens: Amounts = AmountSection(mean=400.0, variation=1.0, min=1.0)
    """Length of prompts."""
    output_tokens: Amounts = AmountSection(mean=200.0, variation=1.0, min=1.0)
    """Length of answers."""
    max_output_tokens: Count | None = None
    """The limit that requests state; longer answers are cut."""
    deadline_seconds: Duration | None = None
    """From the arrival to the end. Default: none."""
    patience_seconds: Duration | None = None
    """When callers without any content disconnect. Default: they wait."""
    allow_remote: bool = False
    """Whether requests allow remote models."""
    skills: tuple[SkillName, ...] = Field(default=(), max_length=16, strict=False)
    """Skills that they need besides text."""
    sessions: Limit = 0
    """Concurrent conversations. 0: every request is independent."""
    session_cached_share: Annotated[float, Field(ge=0, le=1)] = 0.8
    """Share of a prompt that is cached from the last turn of its conversation."""
    session_affinity: bool = False
    """Whether requests name their conversation."""
    from_seconds: Moment = 0.0
    """When arrivals begin."""
    until_seconds: Duration | None = None
    """When arrivals end. Default: at the end."""

    def traffic(self) -> Traffic:
        """Returns the value for the simulation."""
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
    """A route: models in order of preference."""

    name: Name
    """Its name; requests name `route/` and it."""
    candidates: tuple[Target, ...] = Field(min_length=1, max_length=64, strict=False)
    """Models, best first."""
    budget_seconds: Duration | None = None
    """From the arrival to the end. Default: none."""
    keep_alive_seconds: Annotated[float, Field(ge=-1, le=86_400 * 366)] | None = None
    """How long its models stay loaded while idle. -1: without end."""
    pin_primary: bool = False
    """Whether requests wait for the first one."""

    def route(self) -> Route:
        """Returns the value for the simulation."""
        return Route(**self.model_dump())


class FailureSection(Section):
    """A temporary failure."""

    mode: Literal["dies", "breaks", "slow"]
    """`dies`: the runner is gone; `breaks`: attempts fail; `slow`: everything takes longer."""
    hosts: tuple[Name, ...] = Field(default=(), max_length=1000, strict=False)
    """Hosts or host sections; a remote model is on a host of its own name. Default: all."""
    at_seconds: Moment
    """When it begins."""
    for_seconds: Duration
    """How long it lasts."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of attempts that break."""
    factor: Annotated[float, Field(ge=1, le=1000)] = 2.0
    """Slow-down factor."""

    def failure(self) -> Failure:
        """Returns the value for the simulation."""
        return Failure(**self.model_dump() | {"mode": FailureMode(self.mode)})


class RouterLimitsSection(Section):
    """Limits of the router that differ from its defaults, as under `router` in weft.yaml."""

    queue_depth_per_runner: Limit = _LIMITS.queue_depth_per_runner
    """Requests that may wait, per runner."""
    queue_timeout_seconds: Duration = _LIMITS.queue_timeout_seconds
    """Longest wait for a slot."""
    max_attempts: Annotated[int, Field(ge=1, le=10)] = _LIMITS.max_attempts
    """Attempts before any content."""
    max_cold_wait_seconds: Duration = _LIMITS.max_cold_wait_seconds
    """Wait after which other models are evicted for a cold one, whatever the swap costs."""
    durable_share: Annotated[float, Field(ge=0, le=0.5)] = _LIMITS.durable_share
    """Share of a pool's grants for durable tasks while other requests wait."""
    max_durable_waiting: Annotated[int, Field(ge=1, le=20_000_000)] = _LIMITS.max_durable_waiting
    """Durable tasks that wait at once; more are refused. A real router never offers that many."""
    min_turn_seconds: Duration = _LIMITS.min_turn_seconds
    """How long a loaded model serves at least."""
    swap_quantum_ratio: Annotated[float, Field(gt=0, le=1000)] = _LIMITS.swap_quantum_ratio
    """Minimum serving time as a multiple of the load time."""


class DelaysSection(Section):
    """Delays of reports and reactions."""

    report_seconds: Annotated[float, Field(ge=0, le=60)] = _DELAYS.report_seconds
    """Delay of reports from a host."""
    death_noticed_seconds: Annotated[float, Field(ge=0, le=600)] = _DELAYS.death_noticed_seconds
    """Delay until the death of a runner is detected."""
    failure_seconds: Annotated[float, Field(ge=0, le=60)] = _DELAYS.failure_seconds
    """Delay until a failed attempt is detected."""
    unload_seconds: Annotated[float, Field(ge=0, le=60)] = _DELAYS.unload_seconds
    """Delay until the memory of an evicted model is free."""
    memory_watch_seconds: Annotated[float, Field(gt=0, le=60)] = _DELAYS.memory_watch_seconds
    """Interval at which the router reads the VRAM ledger."""


def _amount(value: float | AmountSection) -> Amount:
    return value.amount() if isinstance(value, AmountSection) else Amount(mean=value, highest=value)


def _skills(names: tuple[SkillName, ...]) -> frozenset[Skill]:
    return frozenset(Skill[name.upper()] for name in names)
