"""Scenario files of `weft mesh simulate`: sections with ranges and units, and the reading of YAML into a `Scenario`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import ValidationError

from router_svc.policy.endpoints.routes import MAX_SECONDS, Route
from router_svc.policy.limits import QueueLimits, SchedulerLimits
from router_svc.policy.pool_settings import ChoicePolicy, PoolSettings, RemotePermission, Settings, TenantSettings
from weft.documents.yaml_documents import YamlRefusedError, yaml_documents
from weft.kernel.errors.error_tree import FieldError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.errors.validation_words import plain_words
from weft.kernel.settings.setting_annotations import Name, values_of
from weft.kernel.text.decoding import DECODE_FAULTS
from weft.kernel.values.names import ROUTE_PREFIX
from weft_app.config.loader import validate_section
from weft_app.config.refusals import UNKNOWN_NAME
from weft_app.config.runners import STRICT
from weft_extensions.simulate.scenario import (
    BLOCK_TOKENS,
    MAX_HOSTS,
    Amount,
    Delays,
    Duration,
    Failure,
    HostGroup,
    Limit,
    ModelKind,
    Rate,
    Scenario,
    Tenant,
    TracedRequest,
    Traffic,
)

MAX_FILE_BYTES = 1024 * 1024
MAX_INSTANCES = 200_000
MAX_REQUESTS = 20_000_000
_NUMBER = "constrained-float"
"""pydantic's name of a bounded number in error paths of fields that are a number or a mapping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection(ModelKind):
    """A model, its hosts, and the settings of its pool."""

    policy: ChoicePolicy = ChoicePolicy.FIRST_TOKEN
    """Policy that selects one of several hosts."""
    max_in_flight: Limit = 0
    """Concurrent requests over all hosts. 0: no limit."""

    def __post_init__(self) -> None:
        if self.remote and (self.hosts or self.memory_gib):
            raise ValueError("a remote model has no hosts and no memory_gib")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSection(Tenant):
    """A tenant and its settings."""

    weight: Annotated[float, Gt(0), Le(1000)] = 1.0
    """Its share of scarce capacity, relative to the others."""
    max_in_flight: Limit = 0
    """Its concurrent requests. 0: no limit."""
    allow_remote: RemotePermission = RemotePermission.ON_REQUEST
    """Whether its requests may use remote models."""


@dataclass(frozen=True, kw_only=True)
class RouterSection(QueueLimits):
    """Limits of the router that differ from its defaults, by their names under `router`."""

    max_durable_waiting: Annotated[int, Ge(1), Le(MAX_REQUESTS)] = SchedulerLimits().max_durable_waiting
    """Maximum number of durable tasks that wait; more are refused. A real router never offers that many."""


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
    hosts: Annotated[tuple[HostGroup, ...], MaxLen(1000)] = ()
    """The hosts."""
    models: Annotated[tuple[ModelSection, ...], MinLen(1), MaxLen(1000)]
    """The models."""
    tenants: Annotated[tuple[TenantSection, ...], MinLen(1), MaxLen(1000)]
    """The tenants."""
    arrivals: Annotated[tuple[Traffic, ...], MinLen(1), MaxLen(10_000)]
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
        numbered = {name for each in self.hosts for name in each.host_names()}
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
            conditional = tuple(each.candidate for each in route.conditions)
            _known(f"routes.{number}.conditions", conditional, set(route.candidates))
        for number, failure in enumerate(self.failures):
            _known(f"failures.{number}.hosts", failure.hosts, hosts | numbered | remote)

    def _require_work(self, number: int, arrivals: Traffic) -> None:
        """Requires work for media requests and rejects it for others."""
        named = arrivals.target.removeprefix(ROUTE_PREFIX)
        firsts = {each.name: each.candidates[0] for each in self.routes}
        name = firsts.get(named, named) if arrivals.target != named else named
        model = next((each for each in self.models if each.name == name), None)
        if model is None:
            return
        if arrivals.work is None and model.is_media:
            raise ValueError(f"arrivals.{number}.work: is required, {name} does {model.operation.name.lower()}")
        if arrivals.work is not None and not model.is_media:
            raise ValueError(f"arrivals.{number}.work: {name} answers with tokens")

    def _require_size(self) -> None:
        for kind in ("hosts", "models", "tenants", "routes"):
            names = [each.name for each in getattr(self, kind)]
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
            hosts=self.hosts,
            models=self.models,
            tenants=self.tenants,
            traffic=tuple(
                replace(each, recorded=_trace(folder / each.trace)) if each.trace else each for each in self.arrivals
            ),
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
    except (OSError, *DECODE_FAULTS) as error:
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
    return part in {_NUMBER, Rate.__name__, Amount.__name__}


def _known(field: str, names: tuple[str, ...], known: set[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{field}: there is no {unknown[0]}")
