"""Models, agents, routes and runners as the mesh shows them: declarations over publications, with states of runners."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from registry_svc.mesh.domain import Status
from registry_svc.mesh.records import Held
from weft.api.registry.v1 import (
    agent_pb2,
    model_pb2,
    registry_service_pb2,
    route_pb2,
    runner_pb2,
)
from weft.documents.codec import without_defaults
from weft.kernel.field_rules import enum_words
from weft.kernel.names import resource_id

_API_WORDS = enum_words(model_pb2.ModelProvider.Api.DESCRIPTOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Publisher:
    """A runner at one moment: all that is shown of it, and on which its models and agents depend."""

    profile: runner_pb2.Runner
    """The facts of its incarnation."""
    ticket_key: bytes = field(repr=False)
    active: bool
    capability: Held[runner_pb2.Capability]
    sleeping: frozenset[str]
    """Its models that it reported as hibernating, by name."""
    failed: frozenset[str]
    """Its models that it reported as such that it cannot serve, by name."""
    runtimes: Mapping[str, str]
    """The runtimes of its models that have another one than the runner, by name of the model."""
    last_heartbeat_time: Timestamp
    inactive_time: Timestamp | None
    """None while it is active."""


def combined(declared: model_pb2.ModelManifest, published: model_pb2.ModelManifest | None) -> model_pb2.ModelManifest:
    """Return the manifest of a public model: the declaration wins where it sets a value.

    `remote` is true if either says so, whatever an operator omitted.
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
    manifest.journal = declared.journal or published.journal
    if not declared.skills:
        manifest.skills.extend(published.skills)
    return manifest


def says_the_same(
    given: model_pb2.ModelDeclaration,
    *,
    view: model_pb2.Model | None,
    declared: model_pb2.Model | None,
    publication: model_pb2.Model | None,
) -> bool:
    """Whether a declaration says what is declared already, or else what is published.

    The readable form of a public model may hold facts of its publication; declaring exactly that changes nothing.
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
    """Whether two manifests declare the same: a value that is there by default may be left out."""
    return one == other or without_defaults(one) == without_defaults(other)


def may_serve(declared: model_pb2.Model | None, runner: str) -> bool:
    """Whether the declaration allows this runner to serve the model."""
    return declared is None or declared.declared_runner in {"", runner}


def model_status(manifest: model_pb2.ModelManifest, publisher: Publisher | None) -> Status:
    """Whether a model can answer; `publisher` None: no runner serves it."""
    if publisher is not None and publisher.active:
        if manifest.name in publisher.failed:
            return Status.FAILED
        return Status.HIBERNATING if manifest.name in publisher.sleeping else Status.ACTIVE
    return Status.HIBERNATING if manifest.wake.HasField("by_mesh") else Status.INACTIVE


def public_model(
    declared: model_pb2.Model, publication: Held[model_pb2.Model] | None, publisher: Publisher | None
) -> model_pb2.Model:
    """A declared model over its publication; both None while no runner that may serve it publishes it."""
    model = model_pb2.Model()
    model.CopyFrom(declared)
    if publication is not None:
        model.manifest.CopyFrom(combined(declared.manifest, publication.message().manifest))
    return _of_publisher(model, publisher)


def virtual_model(publication: Held[model_pb2.Model], publisher: Publisher) -> model_pb2.Model:
    """A model that is only published."""
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
    """A declared agent; `target` is the status of the pool it points to."""
    agent = agent_pb2.Agent()
    agent.CopyFrom(declared)
    agent.id = resource_id("agent", agent.manifest.name, agent.create_time.ToNanoseconds())
    agent.status = agent_pb2.Agent.Status.ValueType(target)
    return agent


def virtual_agent(publication: agent_pb2.Agent, publisher: Publisher, target: Status) -> agent_pb2.Agent:
    """A published agent; it answers only while its runner is there."""
    agent = public_agent(publication, target if publisher.active else Status.INACTIVE)
    _set_times(agent, publisher)
    return agent


def shown_route(declared: route_pb2.Route, status: Status) -> route_pb2.Route:
    """A declared route; `status` is the best that one of its candidates has."""
    route = route_pb2.Route()
    route.CopyFrom(declared)
    route.id = resource_id("route", route.manifest.name, route.create_time.ToNanoseconds())
    route.status = route_pb2.Route.Status.ValueType(status)
    return route


def watched_runner(publisher: Publisher, *, with_key: bool) -> registry_service_pb2.WatchedRunner:
    """A runner; its ticket key is for routers only."""
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
