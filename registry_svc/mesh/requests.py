"""From the wire to the domain: every limit of what a caller may send, and the field it is about."""

import base64
import binascii
from collections.abc import Sequence
from typing import Protocol

from registry_svc.checks import require_at_most, require_count, require_text, require_unique
from registry_svc.config import RegistryConfig
from registry_svc.mesh.domain import (
    AgentManifest,
    Capability,
    Heartbeat,
    Kind,
    Manifest,
    Opening,
    RunnerProfile,
)
from registry_svc.mesh.instances import instance_of
from registry_svc.mesh.manifests import to_agent, to_manifest
from weft.api.registry.v1 import registry_service_pb2, resource_kind_pb2, runner_pb2, runner_session_service_pb2
from weft.kernel.errors import invalid_field
from weft.kernel.names import MAX_NAME_CHARS, MAX_REQUEST_ID_CHARS, is_name, require_name, require_token

MAX_CLOCK_OFFSET_SECONDS = 3_155_760_000.0
"""A hundred years: what a runner reports beyond that is kept as this much."""
MAX_ID_CHARS = 128
MAX_ADDRESS_CHARS = 512
MAX_HOST_CHARS = 255
MAX_TOOL_NAMES = 1_024
DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000

_KINDS = {
    resource_kind_pb2.RESOURCE_KIND_MODEL: Kind.MODEL,
    resource_kind_pb2.RESOURCE_KIND_AGENT: Kind.AGENT,
    resource_kind_pb2.RESOURCE_KIND_RUNNER: Kind.RUNNER,
    resource_kind_pb2.RESOURCE_KIND_POOL: Kind.POOL,
    resource_kind_pb2.RESOURCE_KIND_ROUTE: Kind.ROUTE,
}


def to_opening(request: runner_session_service_pb2.OpenSessionRequest, config: RegistryConfig) -> Opening:
    """A valid OpenSession; raises INVALID_ARGUMENT naming the field."""
    require_at_most(request.models, "models", config.max_models_per_session)
    require_at_most(request.agents, "agents", config.max_agents_per_session)
    models = tuple(to_manifest(each, f"models[{index}]", published=True) for index, each in enumerate(request.models))
    require_unique([manifest.name for manifest in models], "models", "name")
    agents = tuple(to_agent(each, f"agents[{index}]") for index, each in enumerate(request.agents))
    require_unique([manifest.name for manifest in agents], "agents", "name")
    if request.session_id:
        require_token(request.session_id, "session_id", MAX_ID_CHARS)
    profile = _profile(request.runner)
    _require_one_namespace(profile.name, models, agents)
    return Opening(
        request_id=require_token(request.request_id, "request_id", MAX_REQUEST_ID_CHARS),
        session_id=request.session_id,
        profile=profile,
        capability=_capability(request.runner.capability, "runner.capability", config),
        models=models,
        agents=agents,
    )


def to_heartbeat(request: runner_session_service_pb2.HeartbeatRequest, config: RegistryConfig) -> Heartbeat:
    """A valid Heartbeat; raises INVALID_ARGUMENT naming the field."""
    require_count(request.sequence, "sequence")
    has_report = request.HasField("capability")
    return Heartbeat(
        session_id=require_token(request.session_id, "session_id", MAX_ID_CHARS),
        incarnation=require_token(request.incarnation, "incarnation", MAX_ID_CHARS),
        sequence=request.sequence,
        capability=_capability(request.capability, "capability", config) if has_report else None,
    )


class PageRequest(Protocol):
    """Any request for a page of names."""

    @property
    def page_size(self) -> int:
        """At most this many."""
        ...

    @property
    def page_token(self) -> str:
        """Where the last page ended."""
        ...


def page_of(request: PageRequest) -> tuple[str, int]:
    """The name after which the page begins, and how many it holds; raises INVALID_ARGUMENT naming the field."""
    if request.page_size < 0:
        raise invalid_field("page_size", "must not be negative")
    size = min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
    if not request.page_token:
        return "", size
    try:
        after = base64.b64decode(request.page_token, altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        after = ""
    if not is_name(after):
        raise invalid_field("page_token", "must be one that an earlier page returned")
    return after, size


def page_token(last_name: str) -> str:
    """The token of the page that begins after `last_name`."""
    return base64.urlsafe_b64encode(last_name.encode("ascii")).decode("ascii")


def to_kind(kind: resource_kind_pb2.ResourceKind.ValueType, field: str) -> Kind:
    """A kind of resource; raises INVALID_ARGUMENT naming the field when it is none."""
    found = _KINDS.get(kind)
    if found is None:
        raise invalid_field(field, "must be model, agent, runner, pool or route")
    return found


def events_of(
    request: registry_service_pb2.ListEventsRequest | registry_service_pb2.WatchEventsRequest,
) -> tuple[Kind | None, str]:
    """Which events are asked for: kind and name, None and "" for all; raises INVALID_ARGUMENT naming the field."""
    if request.name:
        require_name(request.name, "name")
    if not request.kind:
        if request.name:
            raise invalid_field("kind", "must be set where `name` is")
        return None, ""
    return to_kind(request.kind, "kind"), request.name


def event_limit(request: registry_service_pb2.ListEventsRequest) -> int:
    """How many events at most; raises INVALID_ARGUMENT naming the field."""
    return min(require_count(request.limit, "limit") or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)


def _profile(runner: runner_pb2.Runner) -> RunnerProfile:
    if not runner.address:
        raise invalid_field("runner.address", "must not be empty")
    return RunnerProfile(
        name=require_name(runner.name, "runner.name"),
        incarnation=require_token(runner.incarnation, "runner.incarnation", MAX_ID_CHARS),
        address=require_text(runner.address, "runner.address", MAX_ADDRESS_CHARS),
        host=require_text(runner.host, "runner.host", MAX_HOST_CHARS),
        runtime=require_text(runner.runtime, "runner.runtime", MAX_NAME_CHARS),
        version=require_text(runner.version, "runner.version", MAX_NAME_CHARS),
        dial_out=runner.dial_out,
    )


def _require_one_namespace(runner: str, models: Sequence[Manifest], agents: Sequence[AgentManifest]) -> None:
    """What is published together shares the one namespace too: only a pool may be called like a model."""
    model_names = {manifest.name for manifest in models}
    taken = model_names | {manifest.pool_name for manifest in models}
    for index, manifest in enumerate(models):
        for field, name in (("name", manifest.name), ("pool_name", manifest.pool_name)):
            if name == runner:
                raise invalid_field(f"models[{index}].{field}", "must not be the name of the runner")
    for index, agent in enumerate(agents):
        if agent.name == runner or agent.name in taken:
            raise invalid_field(f"agents[{index}].name", "must not be the name of the runner, of a model or of a pool")


def _tool_names(names: Sequence[str], field: str) -> tuple[str, ...]:
    require_at_most(names, field, MAX_TOOL_NAMES)
    checked = tuple(require_name(name, f"{field}[{i}]") for i, name in enumerate(names))
    require_unique(checked, field)
    return checked


def _within(value: float, most: float) -> float:
    return max(-most, min(most, value))


def _capability(capability: runner_pb2.Capability, field: str, config: RegistryConfig) -> Capability:
    require_at_most(capability.instances, f"{field}.instances", config.max_models_per_session)
    instances = tuple(instance_of(state, f"{field}.instances[{i}]") for i, state in enumerate(capability.instances))
    require_unique([instance.model for instance in instances], f"{field}.instances", "model")
    return Capability(
        instances=instances,
        draining=capability.draining,
        max_requests=require_count(capability.max_requests, f"{field}.max_requests"),
        tool_names=_tool_names(capability.tool_names, f"{field}.tool_names"),
        clock_offset_seconds=_within(capability.clock_offset.ToNanoseconds() / 1e9, MAX_CLOCK_OFFSET_SECONDS),
        clock_refused=capability.clock_refused,
    )
