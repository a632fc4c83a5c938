"""From the domain to the wire."""

from datetime import datetime

from google.protobuf import duration_pb2, timestamp_pb2

from registry_svc.config import RegistryConfig
from registry_svc.domain import (
    Instance,
    Manifest,
    Model,
    ModelChanged,
    ModelDeleted,
    Revised,
    Runner,
    RunnerChanged,
    Session,
    Snapshot,
)
from weft.api.registry.v1 import model_pb2, registry_service_pb2, runner_pb2, runner_session_service_pb2


def opened(session: Session, config: RegistryConfig) -> runner_session_service_pb2.OpenSessionResponse:
    """The answer to OpenSession."""
    return runner_session_service_pb2.OpenSessionResponse(
        session_id=session.id,
        ticket_key=session.ticket_key,
        heartbeat_interval=_duration(config.heartbeat_interval_seconds),
        report_interval=_duration(config.report_interval_seconds),
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
            instances=[_instance(instance) for instance in capability.instances], draining=capability.draining
        ),
        last_heartbeat_time=_timestamp(runner.last_heartbeat_at),
    )


def model_message(model: Model) -> model_pb2.Model:
    """A model."""
    publication = model.publication
    return model_pb2.Model(
        manifest=_manifest(publication.manifest),
        runner=publication.runner,
        status=model_pb2.Model.STATUS_ACTIVE if model.active else model_pb2.Model.STATUS_INACTIVE,
        create_time=_timestamp(publication.created_at),
    )


def snapshot_message(snapshot: Snapshot, *, with_keys: bool) -> registry_service_pb2.WatchResponse:
    """The first response of a watch."""
    return registry_service_pb2.WatchResponse(
        revision=snapshot.revision,
        snapshot=registry_service_pb2.Snapshot(
            runners=[_watched(runner, with_keys=with_keys) for runner in snapshot.runners],
            models=[model_message(model) for model in snapshot.models],
        ),
    )


def change_message(revised: Revised, *, with_keys: bool) -> registry_service_pb2.WatchResponse:
    """Every later response of a watch."""
    match revised.change:
        case RunnerChanged(runner):
            change = registry_service_pb2.Change(runner=_watched(runner, with_keys=with_keys))
        case ModelChanged(model):
            change = registry_service_pb2.Change(model=model_message(model))
        case ModelDeleted(name):
            change = registry_service_pb2.Change(deleted_model=name)
        case deleted:
            change = registry_service_pb2.Change(deleted_runner=deleted.name)
    return registry_service_pb2.WatchResponse(revision=revised.revision, change=change)


def _watched(runner: Runner, *, with_keys: bool) -> registry_service_pb2.WatchedRunner:
    key = runner.ticket_key if with_keys else b""
    return registry_service_pb2.WatchedRunner(runner=runner_message(runner), ticket_key=key)


def _instance(instance: Instance) -> runner_pb2.InstanceState:
    return runner_pb2.InstanceState(
        model=instance.model,
        phase=runner_pb2.InstanceState.Phase.ValueType(instance.phase.value),
        slots_total=instance.slots_total,
        slots_used=instance.slots_used,
        load_progress=instance.load_progress,
        context_tokens=instance.context_tokens,
        detail=instance.detail,
    )


def _manifest(manifest: Manifest) -> model_pb2.ModelManifest:
    return model_pb2.ModelManifest(
        name=manifest.name,
        pool_name=manifest.pool_name,
        operations=[model_pb2.ModelOperation.ValueType(operation.value) for operation in manifest.operations],
        context_tokens=manifest.context_tokens,
        digest=manifest.digest,
        remote=manifest.remote,
    )


def _timestamp(moment: datetime) -> timestamp_pb2.Timestamp:
    timestamp = timestamp_pb2.Timestamp()
    timestamp.FromDatetime(moment)
    return timestamp


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration
