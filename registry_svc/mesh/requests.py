"""Requests of runners and readers from the wire to the domain, with every limit."""

import base64
import binascii
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol

from google.protobuf import duration_pb2, timestamp_pb2

from registry_svc.config import RegistryConfig
from registry_svc.mesh.domain import (
    AgentManifest,
    Capability,
    Heartbeat,
    Instance,
    InstanceFault,
    InstanceMemory,
    Kind,
    Manifest,
    Opening,
    Phase,
    RunnerProfile,
)
from registry_svc.mesh.manifests import to_agent, to_kind, to_manifest
from registry_svc.wire_values import cleaned_multiline, require_at_most, require_count, require_text, require_unique
from weft.api.registry.v1 import registry_service_pb2, runner_pb2, runner_session_service_pb2
from weft.kernel.errors import invalid_field
from weft.kernel.names import MAX_NAME_CHARS, MAX_REQUEST_ID_CHARS, is_name, require_name, require_token
from weft.kernel.reasons import Reason

MAX_DETAIL_CHARS = 4096
MAX_SOURCE_CHARS = 32
MAX_DEVICES = 64
MAX_LOAD_SECONDS = 86_400.0


def instance_of(state: runner_pb2.InstanceState, field: str) -> Instance:
    """Return the report about one model. Raises INVALID_ARGUMENT naming the field below `field`."""
    if state.phase not in {phase.value for phase in Phase}:
        raise invalid_field(f"{field}.phase", "must be a known phase")
    progress = state.load_progress if state.HasField("load_progress") else None
    if progress is not None and (math.isnan(progress) or not 0.0 <= progress <= 1.0):
        raise invalid_field(f"{field}.load_progress", "must be from 0 to 1")
    return Instance(
        model=require_name(state.model, f"{field}.model"),
        phase=Phase(state.phase),
        slots_total=require_count(state.slots_total, f"{field}.slots_total"),
        slots_used=require_count(state.slots_used, f"{field}.slots_used"),
        load_progress=progress,
        context_tokens=require_count(state.context_tokens, f"{field}.context_tokens"),
        detail=cleaned_multiline(state.detail, f"{field}.detail", MAX_DETAIL_CHARS),
        memory=_memory_of(state.memory, f"{field}.memory") if state.HasField("memory") else None,
        unload_at=_moment_of(state.unload_time, f"{field}.unload_time") if state.HasField("unload_time") else None,
        pinned=state.pinned,
        load_eta_seconds=_seconds_of(state.load_eta, f"{field}.load_eta") if state.HasField("load_eta") else None,
        usual_load_seconds=_seconds_of(state.usual_load, f"{field}.usual_load")
        if state.HasField("usual_load")
        else None,
        fault_count=require_count(state.fault_count, f"{field}.fault_count"),
        last_fault=_fault_of(state.last_fault, f"{field}.last_fault") if state.HasField("last_fault") else None,
    )


def _memory_of(memory: runner_pb2.InstanceMemory, field: str) -> InstanceMemory:
    require_at_most(memory.device_indexes, f"{field}.device_indexes", MAX_DEVICES)
    measured = memory.measured_bytes if memory.HasField("measured_bytes") else None
    return InstanceMemory(
        leased_bytes=require_count(memory.leased_bytes, f"{field}.leased_bytes"),
        measured_bytes=None if measured is None else require_count(measured, f"{field}.measured_bytes"),
        estimated_bytes=require_count(memory.estimated_bytes, f"{field}.estimated_bytes"),
        estimate_source=require_text(memory.estimate_source, f"{field}.estimate_source", MAX_SOURCE_CHARS),
        device_indexes=tuple(require_count(index, f"{field}.device_indexes") for index in memory.device_indexes),
    )


def _fault_of(fault: runner_pb2.InstanceFault, field: str) -> InstanceFault:
    known = fault.reason in {reason.value for reason in Reason}
    return InstanceFault(
        reason=Reason(fault.reason) if known else Reason.UNSPECIFIED,
        detail=cleaned_multiline(fault.detail, f"{field}.detail", MAX_DETAIL_CHARS),
    )


def _moment_of(moment: timestamp_pb2.Timestamp, field: str) -> datetime:
    try:
        return moment.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise invalid_field(field, "must be a moment between the years 1 and 9999") from None


def _seconds_of(duration: duration_pb2.Duration, field: str) -> float:
    seconds = duration.seconds + duration.nanos / 1e9
    if not 0.0 <= seconds <= MAX_LOAD_SECONDS:
        raise invalid_field(field, f"must be from 0 to {MAX_LOAD_SECONDS:g} s")
    return seconds


MAX_CLOCK_OFFSET_SECONDS = 3_155_760_000.0
"""A hundred years: larger clock offsets are stored as this."""
MAX_ID_CHARS = 128
MAX_ADDRESS_CHARS = 512
MAX_HOST_CHARS = 255
MAX_TOOL_NAMES = 1_024
DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000


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


def events_of(
    request: registry_service_pb2.ListEventsRequest | registry_service_pb2.WatchEventsRequest,
) -> tuple[Kind | None, str]:
    """Return kind and name of the requested events, None and "" for all; raises INVALID_ARGUMENT naming the field."""
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
    """Names published together share the one namespace too: only a pool may have the name of a model."""
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
