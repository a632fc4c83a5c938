"""Checks of requests of runners and readers, with every limit, and the canonical form in which reports are stored.

As in `manifests`, each `valid_*` brings a message that just arrived to its canonical form in place and returns it.
"""

import base64
import binascii
import math
from collections.abc import Sequence
from datetime import UTC
from typing import Protocol

from google.protobuf import duration_pb2, timestamp_pb2

from registry_svc.config import RegistryConfig
from registry_svc.mesh.domain import Kind, Phase
from registry_svc.mesh.manifests import valid_agent, valid_model
from registry_svc.mesh.records import to_kind
from registry_svc.wire_values import cleaned_multiline, require_at_most, require_count, require_text, require_unique
from weft.api.registry.v1 import agent_pb2, model_pb2, registry_service_pb2, runner_pb2, runner_session_service_pb2
from weft.kernel.errors import invalid_field
from weft.kernel.names import MAX_NAME_CHARS, MAX_REQUEST_ID_CHARS, is_name, require_name, require_token
from weft.kernel.reasons import Reason

MAX_DETAIL_CHARS = 4096
MAX_SOURCE_CHARS = 32
MAX_DEVICES = 64
MAX_LOAD_SECONDS = 86_400.0


_PHASES = frozenset(phase.value for phase in Phase)
_REASONS = frozenset(reason.value for reason in Reason)


def valid_instance(state: runner_pb2.InstanceState, field: str) -> runner_pb2.InstanceState:
    """Return a valid report about one model. Raises INVALID_ARGUMENT naming the field below `field`."""
    if state.phase not in _PHASES:
        raise invalid_field(f"{field}.phase", "must be a known phase")
    progress = state.load_progress
    if math.isnan(progress) or not 0.0 <= progress <= 1.0:
        raise invalid_field(f"{field}.load_progress", "must be from 0 to 1")
    require_name(state.model, f"{field}.model")
    require_count(state.slots_total, f"{field}.slots_total")
    require_count(state.slots_used, f"{field}.slots_used")
    require_count(state.context_tokens, f"{field}.context_tokens")
    if state.detail:
        state.detail = cleaned_multiline(state.detail, f"{field}.detail", MAX_DETAIL_CHARS)
    if state.HasField("memory"):
        _check_memory(state.memory, f"{field}.memory")
    if state.HasField("unload_time"):
        _to_canonical_moment(state.unload_time, f"{field}.unload_time")
    if state.HasField("load_eta"):
        _to_canonical_duration(state.load_eta, f"{field}.load_eta")
    if state.HasField("usual_load"):
        _to_canonical_duration(state.usual_load, f"{field}.usual_load")
    require_count(state.fault_count, f"{field}.fault_count")
    if state.HasField("last_fault"):
        fault = state.last_fault
        fault.detail = cleaned_multiline(fault.detail, f"{field}.last_fault.detail", MAX_DETAIL_CHARS)
        if fault.reason not in _REASONS:
            # Of a runner that is newer than this registry.
            fault.ClearField("reason")
    return state


def _check_memory(memory: runner_pb2.InstanceMemory, field: str) -> None:
    require_at_most(memory.device_indexes, f"{field}.device_indexes", MAX_DEVICES)
    require_count(memory.leased_bytes, f"{field}.leased_bytes")
    require_count(memory.measured_bytes, f"{field}.measured_bytes")
    require_count(memory.estimated_bytes, f"{field}.estimated_bytes")
    require_text(memory.estimate_source, f"{field}.estimate_source", MAX_SOURCE_CHARS)
    for index in memory.device_indexes:
        require_count(index, f"{field}.device_indexes")


def _to_canonical_moment(moment: timestamp_pb2.Timestamp, field: str) -> None:
    try:
        moment.FromDatetime(moment.ToDatetime(tzinfo=UTC))
    except (ValueError, OverflowError):
        raise invalid_field(field, "must be a moment between the years 1 and 9999") from None


def _to_canonical_duration(duration: duration_pb2.Duration, field: str) -> None:
    seconds = duration.seconds + duration.nanos / 1e9
    if not 0.0 <= seconds <= MAX_LOAD_SECONDS:
        raise invalid_field(field, f"must be from 0 to {MAX_LOAD_SECONDS:g} s")
    duration.FromNanoseconds(duration.ToNanoseconds())


MAX_CLOCK_OFFSET_NANOSECONDS = 3_155_760_000 * 10**9
"""A hundred years: larger clock offsets are stored as this."""
MAX_ID_CHARS = 128
MAX_ADDRESS_CHARS = 512
MAX_HOST_CHARS = 255
MAX_TOOL_NAMES = 1_024
DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000


def valid_opening(
    request: runner_session_service_pb2.OpenSessionRequest, config: RegistryConfig
) -> runner_session_service_pb2.OpenSessionRequest:
    """Return a valid OpenSession; raises INVALID_ARGUMENT naming the field."""
    require_at_most(request.models, "models", config.max_models_per_session)
    require_at_most(request.agents, "agents", config.max_agents_per_session)
    for index, model in enumerate(request.models):
        valid_model(model, f"models[{index}]", published=True)
    require_unique([model.name for model in request.models], "models", "name")
    for index, agent in enumerate(request.agents):
        valid_agent(agent, f"agents[{index}]")
    require_unique([agent.name for agent in request.agents], "agents", "name")
    if request.session_id:
        require_token(request.session_id, "session_id", MAX_ID_CHARS)
    _check_profile(request.runner)
    _require_one_namespace(request.runner.name, request.models, request.agents)
    require_token(request.request_id, "request_id", MAX_REQUEST_ID_CHARS)
    _to_canonical_report(request.runner.capability, "runner.capability", config)
    return request


def valid_heartbeat(
    request: runner_session_service_pb2.HeartbeatRequest, config: RegistryConfig
) -> runner_session_service_pb2.HeartbeatRequest:
    """Return a valid Heartbeat; raises INVALID_ARGUMENT naming the field."""
    require_count(request.sequence, "sequence")
    require_token(request.session_id, "session_id", MAX_ID_CHARS)
    require_token(request.incarnation, "incarnation", MAX_ID_CHARS)
    if request.HasField("capability"):
        _to_canonical_report(request.capability, "capability", config)
    return request


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


def _check_profile(runner: runner_pb2.Runner) -> None:
    if not runner.address:
        raise invalid_field("runner.address", "must not be empty")
    require_name(runner.name, "runner.name")
    require_token(runner.incarnation, "runner.incarnation", MAX_ID_CHARS)
    require_text(runner.address, "runner.address", MAX_ADDRESS_CHARS)
    require_text(runner.host, "runner.host", MAX_HOST_CHARS)
    require_text(runner.runtime, "runner.runtime", MAX_NAME_CHARS)
    require_text(runner.version, "runner.version", MAX_NAME_CHARS)


def _require_one_namespace(
    runner: str, models: Sequence[model_pb2.ModelManifest], agents: Sequence[agent_pb2.AgentManifest]
) -> None:
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


def _to_canonical_report(report: runner_pb2.Capability, field: str, config: RegistryConfig) -> None:
    require_at_most(report.instances, f"{field}.instances", config.max_models_per_session)
    for index, state in enumerate(report.instances):
        valid_instance(state, f"{field}.instances[{index}]")
    require_unique([state.model for state in report.instances], f"{field}.instances", "model")
    require_count(report.max_requests, f"{field}.max_requests")
    require_at_most(report.tool_names, f"{field}.tool_names", MAX_TOOL_NAMES)
    for index, name in enumerate(report.tool_names):
        require_name(name, f"{field}.tool_names[{index}]")
    require_unique(report.tool_names, f"{field}.tool_names")
    report.DiscardUnknownFields()
    if report.HasField("clock_offset"):
        _to_canonical_offset(report)


def _to_canonical_offset(report: runner_pb2.Capability) -> None:
    nanoseconds = report.clock_offset.ToNanoseconds()
    if nanoseconds:
        report.clock_offset.FromNanoseconds(
            max(-MAX_CLOCK_OFFSET_NANOSECONDS, min(MAX_CLOCK_OFFSET_NANOSECONDS, nanoseconds))
        )
    else:
        report.ClearField("clock_offset")
