"""Scenario files of `weft simulate`: sections with ranges and units, and the reading of YAML into a `Scenario`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import ValidationError

from router_svc.policy.endpoints.routes import MAX_SECONDS, Route
from router_svc.policy.limits import QueueLimits, SchedulerLimits
from router_svc.policy.settings import ChoicePolicy, PoolSettings, RemotePermission, Settings, TenantSettings
from router_svc.simulation.scenario import (
    BLOCK_TOKENS,
    GIBIBYTE,
    Amount,
    Delays,
    Failure,
    HostGroup,
    ModelKind,
    Rate,
    Scenario,
    Tenant,
    TracedRequest,
    Traffic,
)
from weft.documents.yaml_documents import YamlRefusedError, yaml_documents
from weft.kernel.errors import FieldError, invalid_field
from weft.kernel.names import ROUTE_PREFIX
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation, Priority, Skill
from weft.kernel.settings import Name, values_of
from weft.kernel.validation_words import plain_words
from weft_app.config.loader import validate_section
from weft_app.config.refusals import UNKNOWN_NAME
from weft_app.config.runners import STRICT

MAX_FILE_BYTES = 1024 * 1024
MAX_INSTANCES = 200_000
MAX_REQUESTS = 20_000_000
_NUMBER = "constrained-float"
"""pydantic's name of a bounded number in error paths of fields that are a number or a mapping."""
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
Band = Literal["system", "high", "normal", "low", "durable"]
SkillName = Literal["text", "image", "audio", "tools"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AmountSection:
    """A log-normal distribution around a mean."""

    mean: Positive
    """Its mean."""
    variation: Annotated[float, Ge(0), Le(10)] = 0.0
    """Standard deviation over mean."""
    min: Annotated[float, Ge(0), Le(1e9)] = 0.0
    """No value is lower."""
    max: Positive | None = None
    """No value is higher. Default: the mean and five standard deviations."""

    def amount(self) -> Amount:
        """Converts the section for the simulation."""
        highest = self.mean * (1 + 5 * self.variation) if self.max is None else self.max
        return Amount(mean=self.mean, variation=self.variation, lowest=self.min, highest=highest)


Amounts = Annotated[float, Gt(0), Le(1e9)] | AmountSection
"""A number, or a distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSection:
    """Hosts of one kind."""

    name: Name
    """Their name; several get a number: `lab-1`."""
    count: Annotated[int, Ge(1), Le(MAX_HOSTS)] = 1
    """Number of hosts."""
    memory_gib: Gibibytes = 0.0
    """Accelerator memory of each. 0: not tracked; then everything fits."""
    program_gib: Gibibytes = 0.0
    """Part of it that a program other than a model holds all the time."""
    max_requests: Limit = 0
    """Concurrent requests of its runner. 0: as many as its models have slots."""
    engine_requests: Limit = 0
    """Requests that each engine computes concurrently, as many as its KV cache has room for; more wait in it, and it
    reports figures of its load. 0: as many as its models have slots, without figures."""
    figures_until_seconds: Duration | None = None
    """When the figures of its engines cease to arrive. Default: never."""

    def group(self) -> HostGroup:
        """Converts the section for the simulation."""
        return HostGroup(
            name=self.name,
            count=self.count,
            memory_bytes=round(self.memory_gib * GIBIBYTE),
            program_bytes=round(self.program_gib * GIBIBYTE),
            max_requests=self.max_requests,
            engine_requests=self.engine_requests,
            figures_until_seconds=math.inf if self.figures_until_seconds is None else self.figures_until_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """A model and its hosts."""

    name: Name
    """Its name, and the name of its pool if several hosts have it."""
    hosts: Annotated[tuple[Name, ...], MaxLen(1000)] = ()
    """Hosts or host sections. Default: all."""
    memory_gib: Gibibytes = 0.0
    """Memory while it is loaded."""
    load_seconds: Amounts = 10.0
    """Duration of a load."""
    slots: Annotated[int, Ge(1), Le(10_000)] = 4
    """Concurrent requests on each host."""
    prefill_tokens_per_second: Positive = 2000.0
    """Prompt speed of one slot while all are busy."""
    decode_tokens_per_second: Positive = 40.0
    """Output speed of one slot while all are busy."""
    operation: Literal["chat", "image", "transcription", "speech"] = "chat"
    """What it does."""
    work_per_second: Positive = 1.0
    """Speed of one slot while all are busy: steps of a megapixel, seconds of audio, or characters, by the operation."""
    context_tokens: Annotated[int, Ge(0), Le(100_000_000)] = 0
    """Context of a slot. 0: unknown."""
    cache_tokens: Annotated[int, Ge(0), Le(1_000_000_000)] = 0
    """Prompt tokens that the prefix cache of each host keeps; its engine then processes one prompt at a time.
    0: only `sessions` are cached."""
    skills: Annotated[tuple[SkillName, ...], MaxLen(16)] | None = None
    """Its skills. Default: unknown."""
    remote: bool = False
    """Whether it is remote: always loaded, on no host."""
    loaded: bool = False
    """Whether it is loaded at the beginning."""
    pinned: bool = False
    """Whether it is never evicted."""
    keep_alive_seconds: Moment | None = None
    """How long it stays loaded while idle. Default: until its memory is needed."""
    policy: ChoicePolicy = ChoicePolicy.FIRST_TOKEN
    """Policy that selects one of several hosts."""
    max_in_flight: Limit = 0
    """Concurrent requests over all hosts. 0: no limit."""

    def __post_init__(self) -> None:
        if self.remote and (self.hosts or self.memory_gib):
            raise ValueError("a remote model has no hosts and no memory_gib")

    def kind(self) -> ModelKind:
        """Converts the section for the simulation."""
        return ModelKind(
            name=self.name,
            hosts=self.hosts,
            memory_bytes=round(self.memory_gib * GIBIBYTE),
            load_seconds=_amount(self.load_seconds),
            slots=self.slots,
            prefill_tokens_per_second=self.prefill_tokens_per_second,
            decode_tokens_per_second=self.decode_tokens_per_second,
            operation=Operation[self.operation.upper()],
            work_per_second=self.work_per_second,
            context_tokens=self.context_tokens,
            cache_tokens=self.cache_tokens,
            skills=None if self.skills is None else _skills(self.skills),
            remote=self.remote,
            loaded=self.loaded,
            pinned=self.pinned,
            keep_alive_seconds=self.keep_alive_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSection:
    """A tenant."""

    name: Name
    """Its name."""
    weight: Annotated[float, Gt(0), Le(1000)] = 1.0
    """Its share of scarce capacity, relative to the others."""
    max_in_flight: Limit = 0
    """Its concurrent requests. 0: no limit."""
    allow_remote: RemotePermission = RemotePermission.ON_REQUEST
    """Whether its requests may use remote models."""
    priorities: Annotated[Mapping[Band, Annotated[float, Ge(0), Le(1000)]], MaxLen(5)] = field(
        default_factory=lambda: {"normal": 1.0}
    )
    """How its requests are divided over the priority classes: `{high: 1, low: 3}`. Those of `durable` are tasks without
    a queue timeout; a router offers them from its database a few at a time, here all are offered together."""

    def __post_init__(self) -> None:
        if not any(self.priorities.values()):
            raise ValueError("priorities: one must be more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalsSection:
    """Requests of one tenant for one target."""

    tenant: Name
    """The tenant."""
    target: Target
    """A model, or `route/` and a route."""
    rate: Annotated[float, Gt(0), Le(1_000_000)] | Rate | None = None
    """Requests per second, or a rate with its distribution."""
    trace: Annotated[str, MaxLen(4096)] = ""
    """File of recorded requests instead of a rate, relative to this file: JSON lines with `timestamp` in ms,
    `input_length`, `output_length`, and `hash_ids` of blocks of 512 tokens, as in Mooncake's traces."""
    prompt_tokens: Amounts = AmountSection(mean=400.0, variation=1.0, min=1.0)
    """Length of prompts."""
    output_tokens: Amounts = AmountSection(mean=200.0, variation=1.0, min=1.0)
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
    """Whether requests allow remote models."""
    skills: Annotated[tuple[SkillName, ...], MaxLen(16)] = ()
    """Skills that they need besides text."""
    sessions: Limit = 0
    """Concurrent conversations. 0: every request is independent."""
    session_cached_share: Annotated[float, Ge(0), Le(1)] = 0.8
    """Share of a prompt that is cached from the last turn of its conversation."""
    session_affinity: bool = False
    """Whether requests name their conversation."""
    from_seconds: Moment = 0.0
    """When arrivals begin."""
    until_seconds: Duration | None = None
    """When arrivals end. Default: at the end."""

    def __post_init__(self) -> None:
        if (self.rate is None) is not bool(self.trace):
            raise ValueError("either rate or trace is required")

    def traffic(self, folder: Path) -> Traffic:
        """Converts the section for the simulation. Raises INVALID_ARGUMENT for an invalid trace."""
        return Traffic(
            tenant=self.tenant,
            target=self.target,
            rate=Rate(per_second=self.rate) if isinstance(self.rate, float | int) else self.rate,
            trace=_trace(folder / self.trace) if self.trace else (),
            prompt_tokens=_amount(self.prompt_tokens),
            output_tokens=_amount(self.output_tokens),
            work=None if self.work is None else _amount(self.work),
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


@dataclass(frozen=True, kw_only=True)
class RouterSection(QueueLimits):
    """Limits of the router that differ from its defaults, by their names under `router`."""

    max_durable_waiting: Annotated[int, Ge(1), Le(MAX_REQUESTS)] = SchedulerLimits().max_durable_waiting
    """Maximum number of durable tasks that wait; more are refused. A real router never offers that many."""


def _amount(value: float | AmountSection) -> Amount:
    return value.amount() if isinstance(value, AmountSection) else Amount(mean=value, highest=value)


def _skills(names: tuple[SkillName, ...]) -> frozenset[Skill]:
    return frozenset(Skill[name.upper()] for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioDocument:
    """A scenario file."""

    # Applies to every section above without its own configuration.
    __pydantic_config__ = STRICT

    name: Name
    """Its name."""
    description: Annotated[str, MaxLen(4000)] = ""
    """Its purpose."""
    seed: Annotated[int, Ge(0), Le(2**63)] = 1
    """The same seed gives the same run."""
    duration_seconds: Duration = 600.0
    """Time in which requests arrive."""
    requests: Annotated[int, Ge(1), Le(MAX_REQUESTS)] = 1_000_000
    """Maximum number of requests."""
    hosts: Annotated[tuple[HostSection, ...], MaxLen(1000)] = ()
    """The hosts."""
    models: Annotated[tuple[ModelSection, ...], MinLen(1), MaxLen(1000)]
    """The models."""
    tenants: Annotated[tuple[TenantSection, ...], MinLen(1), MaxLen(1000)]
    """The tenants."""
    arrivals: Annotated[tuple[ArrivalsSection, ...], MinLen(1), MaxLen(10_000)]
    """The arrivals of requests."""
    routes: Annotated[tuple[Route, ...], MaxLen(1000)] = ()
    """The routes."""
    allow_cloud_fallback: bool = True
    """Whether routes may fall back to remote models."""
    failures: Annotated[tuple[Failure, ...], MaxLen(1000)] = ()
    """The failures."""
    router: RouterSection = field(default_factory=RouterSection)
    """Limits of the router."""
    delays: Delays = field(default_factory=Delays)
    """Delays of reports and reactions."""

    def __post_init__(self) -> None:
        self._require_known_names()
        self._require_size()

    def _require_known_names(self) -> None:
        hosts, models = {each.name for each in self.hosts}, {each.name for each in self.models}
        numbered = {name for each in self.hosts for name in each.group().host_names()}
        remote = {each.name for each in self.models if each.remote}
        tenants, routes = {each.name for each in self.tenants}, {each.name for each in self.routes}
        for number, model in enumerate(self.models):
            _known(f"models.{number}.hosts", model.hosts, hosts | numbered)
        for number, arrivals in enumerate(self.arrivals):
            _known(f"arrivals.{number}.tenant", (arrivals.tenant,), tenants)
            _known(f"arrivals.{number}.target", (arrivals.target,), models | {ROUTE_PREFIX + name for name in routes})
            self._require_work(number, arrivals)
        for number, route in enumerate(self.routes):
            _known(f"routes.{number}.candidates", route.candidates, models)
        for number, failure in enumerate(self.failures):
            _known(f"failures.{number}.hosts", failure.hosts, hosts | numbered | remote)

    def _require_work(self, number: int, arrivals: ArrivalsSection) -> None:
        """Requires work for media requests and rejects it for others."""
        named = arrivals.target.removeprefix(ROUTE_PREFIX)
        firsts = {each.name: each.candidates[0] for each in self.routes}
        name = firsts.get(named, named) if arrivals.target != named else named
        model = next((each for each in self.models if each.name == name), None)
        if model is None:
            return
        if arrivals.work is None and model.operation != "chat":
            raise ValueError(f"arrivals.{number}.work: is required, {name} does {model.operation}")
        if arrivals.work is not None and model.operation == "chat":
            raise ValueError(f"arrivals.{number}.work: {name} answers with tokens")

    def _require_size(self) -> None:
        for kind, named in (("hosts", self.hosts), ("models", self.models), ("tenants", self.tenants)):
            names = [each.name for each in named]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{kind}: names must be unique: {', '.join(twice)}")
        counts = {host.name: host.count for host in self.hosts}
        if sum(counts.values()) > MAX_HOSTS:
            raise ValueError(f"hosts: at most {MAX_HOSTS} in all")
        all_hosts = sum(counts.values())
        instances = sum(sum(counts.get(name, 1) for name in m.hosts) if m.hosts else all_hosts for m in self.models)
        if instances > MAX_INSTANCES:
            raise ValueError(f"models: at most {MAX_INSTANCES} on all hosts together")
        for number, model in enumerate(self.models):
            if not model.remote and not self.hosts:
                raise ValueError(f"models.{number}.hosts: there are no hosts")

    def scenario(self, folder: Path) -> Scenario:
        """Converts the file for the simulation. `folder`: the folder that names of traces are relative to."""
        return Scenario(
            name=self.name,
            description=self.description,
            seed=self.seed,
            duration_seconds=self.duration_seconds,
            max_requests=self.requests,
            hosts=tuple(host.group() for host in self.hosts),
            models=tuple(model.kind() for model in self.models),
            tenants=tuple(Tenant(name=each.name, bands=_bands(each.priorities)) for each in self.tenants),
            traffic=tuple(each.traffic(folder) for each in self.arrivals),
            routes={each.name: each for each in self.routes},
            cloud_fallback=self.allow_cloud_fallback,
            failures=self.failures,
            settings=self._settings(),
            limits=SchedulerLimits(**values_of(RouterSection, self.router)),
            delays=self.delays,
        )

    def _settings(self) -> Settings:
        return Settings(
            pools={
                each.name: PoolSettings(policy=each.policy, max_in_flight=each.max_in_flight) for each in self.models
            },
            tenants={
                each.name: TenantSettings(
                    weight=each.weight,
                    max_in_flight=each.max_in_flight,
                    allow_remote=each.allow_remote,
                )
                for each in self.tenants
            },
        )


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1_000 * MAX_SECONDS)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]
    hash_ids: tuple[int, ...]


_LINES = msgspec.json.Decoder(_Line)


MAX_TRACE_BYTES = 256 * 1024 * 1024


def _trace(path: Path) -> tuple[TracedRequest, ...]:
    try:
        if path.stat().st_size > MAX_TRACE_BYTES:
            raise invalid_field("trace", f"{path} is larger than {MAX_TRACE_BYTES} bytes")
        lines = sorted(_LINES.decode_lines(path.read_bytes()), key=lambda line: line.timestamp)
    except (OSError, msgspec.MsgspecError) as error:
        raise invalid_field("trace", f"{path} cannot be read: {error}") from error
    for line in lines:
        if len(line.hash_ids) * BLOCK_TOKENS < line.input_length:
            raise invalid_field(
                "trace", f"{path} has an input_length of {line.input_length} with {len(line.hash_ids)} hash_ids"
            )
    return tuple(
        TracedRequest(
            at_seconds=line.timestamp / 1_000,
            prompt_tokens=line.input_length,
            output_tokens=max(1, line.output_length),
            blocks=line.hash_ids,
        )
        for line in lines
    )


def load_scenario(path: Path) -> Scenario:
    """Reads a scenario file. Raises INVALID_ARGUMENT naming file and field."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise invalid_field("SCENARIO", f"{path} cannot be read: {error.strerror}") from error
    if len(text) > MAX_FILE_BYTES:
        raise invalid_field("SCENARIO", f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        documents = [each.value for each in yaml_documents(text.decode("utf-8"), merge_keys=True) if each is not None]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" (line {where.line + 1})" if where is not None else ""
        what = f"is refused: {error.problem}" if isinstance(error, YamlRefusedError) else "is not YAML"
        raise FieldError("SCENARIO", f"{path} {what}{line}", Reason.MALFORMED_REQUEST) from error
    if len(documents) != 1 or not isinstance(documents[0], Mapping):
        raise invalid_field("SCENARIO", f"{path} must be a mapping of names to values, in one document")
    return parse_scenario(dict(documents[0]), str(path))


def parse_scenario(document: dict[str, Any], source: str) -> Scenario:
    """Parses a scenario document. Raises INVALID_ARGUMENT naming `source` and the field."""
    try:
        return validate_section(ScenarioDocument, document, Path(source)).scenario(Path(source).parent)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        # Skips the error that a mapping is not a number.
        relevant = [each for each in errors if each["loc"][-1:] != (_NUMBER,) or not isinstance(each["input"], Mapping)]
        first = (relevant or errors)[0]
        field = ".".join(str(part) for part in first["loc"] if not _is_alternative(part)) or "scenario"
        words = "there is no such field" if first["type"] == UNKNOWN_NAME else plain_words(first["msg"])
        raise invalid_field(field, f"{words} (in {source})") from error


def _is_alternative(part: str | int) -> bool:
    """Whether a part of an error's path names an alternative of a union type, not a field of the file."""
    return isinstance(part, str) and (part in {_NUMBER, Rate.__name__} or part.endswith("Section"))


def _bands(shares: Mapping[Band, float]) -> dict[Priority, float]:
    return {Priority[name.upper()]: share for name, share in shares.items() if share}


def _known(field: str, names: tuple[str, ...], known: set[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{field}: there is no {unknown[0]}")
