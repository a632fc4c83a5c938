"""Scenario files of `weft simulate`: parsing and validation. Unknown names are refused, every number has a range."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError, model_validator

from router_svc.policy.arrival import ROUTE_PREFIX
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.settings import ChoicePolicy, PoolSettings, RemotePermission, Settings, TenantSettings
from router_svc.simulation.scenario import Delays, Scenario, Tenant
from weft.documents.yaml_documents import YamlRefusedError, yaml_documents
from weft.kernel.errors import FieldError, invalid_field
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority
from weft_app.config.scenario_sections import (
    MAX_HOSTS,
    ArrivalsSection,
    Band,
    DelaysSection,
    Duration,
    FailureSection,
    HostSection,
    ModelSection,
    RouterLimitsSection,
    RouteSection,
    TenantSection,
)
from weft_app.config.section import Name, Section

MAX_FILE_BYTES = 1024 * 1024
MAX_INSTANCES = 200_000
MAX_REQUESTS = 20_000_000
_NUMBER = "constrained-float"
"""pydantic's name of a bounded number, in the path of a field that is a number or a mapping."""


class ScenarioDocument(Section):
    """A scenario file."""

    name: Name
    """Its name."""
    description: Annotated[str, Field(max_length=4000)] = ""
    """Its purpose."""
    seed: Annotated[int, Field(ge=0, le=2**63)] = 1
    """The same seed gives the same run."""
    duration_seconds: Duration = 600.0
    """Time in which requests arrive."""
    requests: Annotated[int, Field(ge=1, le=MAX_REQUESTS)] = 1_000_000
    """Maximum number of requests."""
    hosts: tuple[HostSection, ...] = Field(default=(), max_length=1000, strict=False)
    """The hosts."""
    models: tuple[ModelSection, ...] = Field(min_length=1, max_length=1000, strict=False)
    """The models."""
    tenants: tuple[TenantSection, ...] = Field(min_length=1, max_length=1000, strict=False)
    """The tenants."""
    arrivals: tuple[ArrivalsSection, ...] = Field(min_length=1, max_length=10_000, strict=False)
    """The arrivals of requests."""
    routes: tuple[RouteSection, ...] = Field(default=(), max_length=1000, strict=False)
    """The routes."""
    allow_cloud_fallback: bool = True
    """Whether routes may fall back to remote models."""
    failures: tuple[FailureSection, ...] = Field(default=(), max_length=1000, strict=False)
    """The failures."""
    router: RouterLimitsSection = RouterLimitsSection()
    """Limits of the router."""
    delays: DelaysSection = DelaysSection()
    """Delays of reports and reactions."""

    @model_validator(mode="after")
    def _names_are_known(self) -> "ScenarioDocument":
        hosts, models = {each.name for each in self.hosts}, {each.name for each in self.models}
        numbered = {name for each in self.hosts for name in each.group().host_names()}
        remote = {each.name for each in self.models if each.remote}
        tenants, routes = {each.name for each in self.tenants}, {each.name for each in self.routes}
        for number, model in enumerate(self.models):
            _known(f"models.{number}.hosts", model.hosts, hosts | numbered)
        for number, arrivals in enumerate(self.arrivals):
            _known(f"arrivals.{number}.tenant", (arrivals.tenant,), tenants)
            _known(f"arrivals.{number}.target", (arrivals.target,), models | {ROUTE_PREFIX + name for name in routes})
        for number, route in enumerate(self.routes):
            _known(f"routes.{number}.candidates", route.candidates, models)
        for number, failure in enumerate(self.failures):
            _known(f"failures.{number}.hosts", failure.hosts, hosts | numbered | remote)
        return self

    @model_validator(mode="after")
    def _is_not_too_large(self) -> "ScenarioDocument":
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
        return self

    def scenario(self) -> Scenario:
        """Returns the scenario for the simulation."""
        return Scenario(
            name=self.name,
            description=self.description,
            seed=self.seed,
            duration_seconds=self.duration_seconds,
            max_requests=self.requests,
            hosts=tuple(host.group() for host in self.hosts),
            models=tuple(model.kind() for model in self.models),
            tenants=tuple(Tenant(name=each.name, bands=_bands(each.priorities)) for each in self.tenants),
            traffic=tuple(each.traffic() for each in self.arrivals),
            routes={each.name: each.route() for each in self.routes},
            cloud_fallback=self.allow_cloud_fallback,
            failures=tuple(each.failure() for each in self.failures),
            settings=self._settings(),
            limits=SchedulerLimits(**self.router.model_dump()),
            delays=Delays(**self.delays.model_dump()),
        )

    def _settings(self) -> Settings:
        return Settings(
            pools={
                each.name: PoolSettings(policy=ChoicePolicy(each.policy), max_in_flight=each.max_in_flight)
                for each in self.models
            },
            tenants={
                each.name: TenantSettings(
                    weight=each.weight,
                    max_in_flight=each.max_in_flight,
                    allow_remote=RemotePermission(each.allow_remote),
                )
                for each in self.tenants
            },
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
        return ScenarioDocument.model_validate(document).scenario()
    except ValidationError as error:
        errors = error.errors(include_url=False)
        # For a mapping, the error that it is not a number is useless.
        relevant = [each for each in errors if each["loc"][-1:] != (_NUMBER,) or not isinstance(each["input"], Mapping)]
        first = (relevant or errors)[0]
        field = ".".join(str(part) for part in first["loc"] if not _is_alternative(part)) or "scenario"
        raise invalid_field(field, f"{first['msg'].removeprefix('Value error, ')} (in {source})") from error


def _is_alternative(part: str | int) -> bool:
    """Whether a part of an error's path names an alternative of a union type, not a field of the file."""
    return isinstance(part, str) and (part == _NUMBER or part.endswith("Section"))


def _bands(shares: Mapping[Band, float]) -> dict[Priority, float]:
    return {Priority[name.upper()]: share for name, share in shares.items() if share}


def _known(field: str, names: tuple[str, ...], known: set[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{field}: there is no {unknown[0]}")
