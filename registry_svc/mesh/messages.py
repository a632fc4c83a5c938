"""From the domain to the wire."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TypeVar

from registry_svc.config import RegistryConfig
from registry_svc.mesh.domain import (
    Agent,
    Event,
    Instance,
    MeshSettings,
    Model,
    Pool,
    Route,
    Runner,
    Session,
    Status,
)
from registry_svc.mesh.manifests import agent_manifest_message, kind_message, manifest_message, route_manifest_message
from registry_svc.mesh.watch import (
    AgentChanged,
    AgentDeleted,
    ModelChanged,
    ModelDeleted,
    Revised,
    RouteChanged,
    RouteDeleted,
    RunnerChanged,
    RunnerDeleted,
    SettingsChanged,
    Snapshot,
)
from registry_svc.wire_values import duration_message, timestamp
from weft.api.registry.v1 import (
    agent_pb2,
    event_pb2,
    model_pb2,
    pool_pb2,
    registry_service_pb2,
    resource_kind_pb2,
    route_pb2,
    runner_pb2,
    runner_session_service_pb2,
    settings_pb2,
)

T = TypeVar("T")
M = TypeVar("M")

# After so many messages the event loop gets a turn: a snapshot of a large mesh takes long to make.
CONVERTED_PER_TURN = 200

_MODEL_STATUSES = {
    Status.ACTIVE: model_pb2.Model.STATUS_ACTIVE,
    Status.INACTIVE: model_pb2.Model.STATUS_INACTIVE,
    Status.HIBERNATING: model_pb2.Model.STATUS_HIBERNATING,
}
_AGENT_STATUSES = {
    Status.ACTIVE: agent_pb2.Agent.STATUS_ACTIVE,
    Status.INACTIVE: agent_pb2.Agent.STATUS_INACTIVE,
    Status.HIBERNATING: agent_pb2.Agent.STATUS_HIBERNATING,
}
_ROUTE_STATUSES = {
    Status.ACTIVE: route_pb2.Route.STATUS_ACTIVE,
    Status.INACTIVE: route_pb2.Route.STATUS_INACTIVE,
    Status.HIBERNATING: route_pb2.Route.STATUS_HIBERNATING,
}


def opened(
    session: Session, config: RegistryConfig, *, mesh_time: datetime, registry_time: datetime, dial_out: bool
) -> runner_session_service_pb2.OpenSessionResponse:
    """Return the answer to OpenSession. A dial-out runner may have any clock: it is not a machine of the operator."""
    return runner_session_service_pb2.OpenSessionResponse(
        session_id=session.id,
        ticket_key=session.ticket_key,
        heartbeat_interval=duration_message(config.heartbeat_interval_seconds),
        report_interval=duration_message(config.report_interval_seconds),
        mesh_time=timestamp(mesh_time),
        registry_time=timestamp(registry_time),
        max_clock_offset=None if dial_out else duration_message(config.max_clock_offset_seconds),
    )


def runner_message(runner: Runner) -> runner_pb2.Runner:
    """A runner, without its key."""
    profile, capability = runner.profile, runner.capability
    return runner_pb2.Runner(
        name=profile.name,
        incarnation=profile.incarnation,
        address=profile.address,
        host=profile.host,
        runtime=profile.runtime,
        version=profile.version,
        status=runner_pb2.Runner.STATUS_ACTIVE if runner.active else runner_pb2.Runner.STATUS_INACTIVE,
        capability=runner_pb2.Capability(
            instances=[instance_message(instance) for instance in capability.instances],
            draining=capability.draining,
            max_requests=capability.max_requests,
            tool_names=capability.tool_names,
            clock_offset=duration_message(capability.clock_offset_seconds) if capability.clock_offset_seconds else None,
            clock_refused=capability.clock_refused,
        ),
        last_heartbeat_time=timestamp(runner.last_heartbeat_at),
        inactive_time=timestamp(runner.inactive_since),
        dial_out=profile.dial_out,
    )


def model_message(model: Model) -> model_pb2.Model:
    """A model."""
    return model_pb2.Model(
        manifest=manifest_message(model.manifest),
        runner=model.runner,
        status=_MODEL_STATUSES[model.status],
        create_time=timestamp(model.created_at),
        kind=model_pb2.Model.KIND_PUBLIC if model.public else model_pb2.Model.KIND_VIRTUAL,
        last_heartbeat_time=timestamp(model.last_heartbeat_at),
        inactive_time=timestamp(model.inactive_since),
        declared_runner=model.declared_runner,
    )


def agent_message(agent: Agent) -> agent_pb2.Agent:
    """An agent."""
    return agent_pb2.Agent(
        manifest=agent_manifest_message(agent.manifest),
        kind=agent_pb2.Agent.KIND_PUBLIC if agent.public else agent_pb2.Agent.KIND_VIRTUAL,
        runner=agent.runner,
        status=_AGENT_STATUSES[agent.status],
        create_time=timestamp(agent.created_at),
        last_heartbeat_time=timestamp(agent.last_heartbeat_at),
        inactive_time=timestamp(agent.inactive_since),
    )


def route_message(route: Route) -> route_pb2.Route:
    """A route."""
    return route_pb2.Route(
        manifest=route_manifest_message(route.manifest),
        status=_ROUTE_STATUSES[route.status],
        create_time=timestamp(route.created_at),
    )


def settings_message(settings: MeshSettings) -> settings_pb2.MeshSettings:
    """Return the settings of the mesh, for the wire."""
    return settings_pb2.MeshSettings(allow_cloud_fallback=settings.allow_cloud_fallback, revision=settings.revision)


def pool_message(pool: Pool) -> pool_pb2.Pool:
    """A pool with its members."""
    return pool_pb2.Pool(
        name=pool.name,
        explicit=pool.explicit,
        members=[model_message(model) for model in pool.members],
        size=len(pool.members),
        active_count=pool.active_count,
    )


def event_message(event: Event) -> event_pb2.Event:
    """An event."""
    draft = event.draft
    return event_pb2.Event(
        sequence=event.sequence,
        time=timestamp(event.at),
        kind=resource_kind_pb2.RESOURCE_KIND_UNSPECIFIED if draft.kind is None else kind_message(draft.kind),
        name=draft.name,
        reason=event_pb2.EventReason.ValueType(draft.reason.value),
        message=draft.message,
    )


async def snapshot_message(snapshot: Snapshot, *, with_keys: bool) -> registry_service_pb2.WatchResponse:
    """The first response of a watch. A large one takes long; the event loop turns meanwhile."""

    def watched(runner: Runner) -> registry_service_pb2.WatchedRunner:
        return _watched(runner, with_keys=with_keys)

    return registry_service_pb2.WatchResponse(
        revision=snapshot.revision,
        snapshot=registry_service_pb2.Snapshot(
            runners=await converted(snapshot.runners, watched),
            models=await converted(snapshot.models, model_message),
            agents=await converted(snapshot.agents, agent_message),
            routes=await converted(snapshot.routes, route_message),
            settings=settings_message(snapshot.settings),
        ),
    )


def change_message(revised: Revised, *, with_keys: bool) -> registry_service_pb2.WatchResponse:
    """Every later response of a watch."""
    match revised.change:
        case RunnerChanged(runner):
            change = registry_service_pb2.Change(runner=_watched(runner, with_keys=with_keys))
        case ModelChanged(model):
            change = registry_service_pb2.Change(model=model_message(model))
        case AgentChanged(agent):
            change = registry_service_pb2.Change(agent=agent_message(agent))
        case RouteChanged(route):
            change = registry_service_pb2.Change(route=route_message(route))
        case SettingsChanged(settings):
            change = registry_service_pb2.Change(settings=settings_message(settings))
        case RunnerDeleted(name):
            change = registry_service_pb2.Change(deleted_runner=name)
        case ModelDeleted(name):
            change = registry_service_pb2.Change(deleted_model=name)
        case AgentDeleted(name):
            change = registry_service_pb2.Change(deleted_agent=name)
        case RouteDeleted(name):
            change = registry_service_pb2.Change(deleted_route=name)
    return registry_service_pb2.WatchResponse(revision=revised.revision, change=change)


async def converted(items: Iterable[T], convert: Callable[[T], M]) -> Sequence[M]:
    """Many messages; the event loop turns meanwhile."""
    messages: list[M] = []
    for item in items:
        messages.append(convert(item))
        if len(messages) % CONVERTED_PER_TURN == 0:
            await asyncio.sleep(0)
    return messages


def _watched(runner: Runner, *, with_keys: bool) -> registry_service_pb2.WatchedRunner:
    key = runner.ticket_key if with_keys else b""
    return registry_service_pb2.WatchedRunner(runner=runner_message(runner), ticket_key=key)


def instance_message(instance: Instance) -> runner_pb2.InstanceState:
    """The same, to the wire."""
    message = runner_pb2.InstanceState(
        model=instance.model,
        phase=runner_pb2.InstanceState.Phase.ValueType(instance.phase.value),
        slots_total=instance.slots_total,
        slots_used=instance.slots_used,
        load_progress=instance.load_progress,
        context_tokens=instance.context_tokens,
        detail=instance.detail,
        pinned=instance.pinned,
        fault_count=instance.fault_count,
    )
    fault = instance.last_fault
    if fault is not None:
        message.last_fault.reason = fault.reason.value  # type: ignore[assignment]  # same numbers
        message.last_fault.detail = fault.detail
    memory = instance.memory
    if memory is not None:
        message.memory.CopyFrom(
            runner_pb2.InstanceMemory(
                leased_bytes=memory.leased_bytes,
                measured_bytes=memory.measured_bytes,
                estimated_bytes=memory.estimated_bytes,
                estimate_source=memory.estimate_source,
                device_indexes=memory.device_indexes,
            )
        )
    if instance.unload_at is not None:
        message.unload_time.FromDatetime(instance.unload_at)
    if instance.load_eta_seconds is not None:
        message.load_eta.FromNanoseconds(int(instance.load_eta_seconds * 1e9))
    if instance.usual_load_seconds is not None:
        message.usual_load.FromNanoseconds(int(instance.usual_load_seconds * 1e9))
    return message
