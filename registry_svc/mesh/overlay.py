"""Builds models, agents, routes and runners for display: declarations over publications, with runners' states."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from registry_svc.mesh.records import Held
from registry_svc.mesh.states import Status
from weft.api.registry.v1 import (
    agent_pb2,
    model_pb2,
    registry_service_pb2,
    route_pb2,
    runner_pb2,
)
from weft.documents.codec import without_defaults
from weft.kernel.schemas.field_rules import enum_words
from weft.kernel.values.names import resource_id

Declared = TypeVar("Declared", agent_pb2.Agent, route_pb2.Route)
_API_WORDS = enum_words(model_pb2.ModelProvider.Api.DESCRIPTOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Publisher:
    """The state of a runner at one moment, on which its models and agents depend."""

    profile: runner_pb2.Runner
    """Facts of its incarnation."""
    ticket_key: bytes = field(repr=False)
    active: bool
    capability: Held[runner_pb2.Capability]
    sleeping: frozenset[str]
    """Names of its models reported as hibernating."""
    failed: frozenset[str]
    """Names of its models reported as failed."""
    runtimes: Mapping[str, str]
    """Runtimes that differ from the runner's, by model name."""
    last_heartbeat_time: Timestamp
    inactive_time: Timestamp | None
    """None while active."""


def combined(declared: model_pb2.ModelManifest, published: model_pb2.ModelManifest | None) -> model_pb2.ModelManifest:
    """Returns the manifest of a public model: values of the declaration take precedence.

    `remote` is true if it is true in either.
    """
    if published is None:
        return declared
    manifest = model_pb2.ModelManifest()
    manifest.CopyFrom(declared)
    manifest.remote = declared.remote or published.remote
    manifest.context_tokens = declared.context_tokens or published.context_tokens
    manifest.digest = declared.digest or published.digest
    manifest.upstream = declared.upstream or published.upstream
    if published.HasField("tags"):
        manifest.tags.tier = declared.tags.tier or published.tags.tier
        manifest.tags.owner = declared.tags.owner or published.tags.owner
        if not declared.tags.labels:
            manifest.tags.labels.update(published.tags.labels)
    if published.HasField("price") and not declared.HasField("price"):
        manifest.price.CopyFrom(published.price)
    manifest.journal = declared.journal or published.journal
    if not declared.skills:
        manifest.skills.extend(published.skills)
    return manifest


def is_unchanged(
    given: model_pb2.ModelDeclaration,
    *,
    view: model_pb2.Model | None,
    declared: model_pb2.Model | None,
    publication: model_pb2.Model | None,
) -> bool:
    """Whether a declaration equals the existing one, or if there is none, the publication.

    The displayed form of a public model may have facts of its publication; declaring exactly that changes nothing.
    """
    if declared is not None:
        same = is_alike(given.manifest, declared.manifest) or (
            view is not None and is_alike(given.manifest, view.manifest)
        )
        return same and given.runner == declared.declared_runner
    if publication is None:
        return False
    return is_alike(given.manifest, publication.manifest) and given.runner in {"", publication.runner}


def is_alike(one: Message, other: Message) -> bool:
    """Whether two manifests are equal, apart from omitted default values."""
    return one == other or without_defaults(one) == without_defaults(other)


def may_serve(declared: model_pb2.Model | None, runner: str) -> bool:
    """Whether the declaration allows this runner to serve the model."""
    return declared is None or declared.declared_runner in {"", runner}


def model_status(manifest: model_pb2.ModelManifest, publisher: Publisher | None) -> Status:
    """Returns the status of a model; `publisher` None: no runner serves it."""
    if publisher is not None and publisher.active:
        if manifest.name in publisher.failed:
            return Status.FAILED
        return Status.HIBERNATING if manifest.name in publisher.sleeping else Status.ACTIVE
    return Status.HIBERNATING if manifest.wake.HasField("by_mesh") else Status.INACTIVE


def public_model(
    declared: model_pb2.Model, publication: Held[model_pb2.Model] | None, publisher: Publisher | None
) -> model_pb2.Model:
    """Returns a declared model over its publication, if a runner that may serve it publishes it."""
    model = model_pb2.Model()
    model.CopyFrom(declared)
    if publication is not None:
        model.manifest.CopyFrom(combined(declared.manifest, publication.message().manifest))
    return _of_publisher(model, publisher)


def virtual_model(publication: Held[model_pb2.Model], publisher: Publisher) -> model_pb2.Model:
    """Returns a model that is only published."""
    return _of_publisher(publication.message(), publisher)


def _of_publisher(model: model_pb2.Model, publisher: Publisher | None) -> model_pb2.Model:
    model.status = model_pb2.Model.Status.ValueType(model_status(model.manifest, publisher))
    model.id = resource_id("model", model.manifest.name, model.create_time.ToNanoseconds())
    provider = model.manifest.provider
    model.type = _API_WORDS.get(provider.api, "") if model.manifest.HasField("provider") else ""
    if publisher is not None:
        model.type = model.type or publisher.runtimes.get(model.manifest.name, publisher.profile.runtime)
        model.runner = publisher.profile.name
        _set_times(model, publisher)
    return model


def public_agent(declared: agent_pb2.Agent, target: Status) -> agent_pb2.Agent:
    """Returns a declared agent; `target` is the status of its pool."""
    return _with_status("agent", declared, target)


def virtual_agent(publication: agent_pb2.Agent, publisher: Publisher, target: Status) -> agent_pb2.Agent:
    """Returns a published agent, which is only active while its runner is."""
    agent = public_agent(publication, target if publisher.active else Status.INACTIVE)
    _set_times(agent, publisher)
    return agent


def shown_route(declared: route_pb2.Route, status: Status) -> route_pb2.Route:
    """Returns a declared route; `status` is the best status of its candidates."""
    return _with_status("route", declared, status)


def _with_status(kind: str, declared: Declared, status: Status) -> Declared:
    shown = type(declared)()
    shown.CopyFrom(declared)
    shown.id = resource_id(kind, shown.manifest.name, shown.create_time.ToNanoseconds())
    shown.status = int(status)  # type: ignore[assignment]  # same numbers
    return shown


def watched_runner(publisher: Publisher, *, with_key: bool) -> registry_service_pb2.WatchedRunner:
    """Returns a runner, with its ticket key only for routers."""
    key = publisher.ticket_key if with_key else b""
    watched = registry_service_pb2.WatchedRunner(runner=publisher.profile, ticket_key=key)
    runner = watched.runner
    runner.status = runner_pb2.Runner.STATUS_ACTIVE if publisher.active else runner_pb2.Runner.STATUS_INACTIVE
    publisher.capability.add_to(runner.capability)
    _set_times(runner, publisher)
    return watched


def _set_times(record: model_pb2.Model | agent_pb2.Agent | runner_pb2.Runner, publisher: Publisher) -> None:
    record.last_heartbeat_time.CopyFrom(publisher.last_heartbeat_time)
    if publisher.inactive_time is not None:
        record.inactive_time.CopyFrom(publisher.inactive_time)
