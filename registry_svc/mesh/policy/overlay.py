"""Lays declarations over publications: one view of each model and agent."""

from dataclasses import dataclass, replace
from datetime import datetime

from registry_svc.mesh.domain import (
    Agent,
    AgentPublication,
    DeclaredAgent,
    DeclaredModel,
    Manifest,
    Model,
    Publication,
    Status,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Publisher:
    """The runner of a publication, and its present state."""

    name: str
    active: bool
    sleeping: frozenset[str]
    """Its models that it reported as hibernating, by name."""
    last_heartbeat_at: datetime
    inactive_since: datetime | None


def combined(declared: Manifest, published: Manifest | None) -> Manifest:
    """Return the manifest of a public model: the declaration wins where it sets a value.

    `remote` is true if either says so, whatever an operator omitted.
    """
    if published is None:
        return declared
    return replace(
        declared,
        remote=declared.remote or published.remote,
        context_tokens=declared.context_tokens or published.context_tokens,
        digest=declared.digest or published.digest,
        skills=declared.skills or published.skills,
    )


def may_serve(declared: DeclaredModel | None, runner: str) -> bool:
    """Whether the declaration allows this runner to serve the model."""
    return declared is None or not declared.runner or declared.runner == runner


def model_status(manifest: Manifest, publisher: Publisher | None) -> Status:
    """Whether a model can answer; `publisher` None: no runner serves it."""
    if publisher is not None and publisher.active:
        return Status.HIBERNATING if manifest.name in publisher.sleeping else Status.ACTIVE
    can_be_woken = manifest.wake is not None and manifest.wake.by_mesh is not None
    return Status.HIBERNATING if can_be_woken else Status.INACTIVE


def public_model(declared: DeclaredModel, publication: Publication | None, publisher: Publisher | None) -> Model:
    """A declared model over its publication; both None while no runner that may serve it publishes it."""
    manifest = combined(declared.manifest, None if publication is None else publication.manifest)
    return Model(
        manifest=manifest,
        public=True,
        runner="" if publisher is None else publisher.name,
        status=model_status(manifest, publisher),
        created_at=declared.created_at,
        last_heartbeat_at=None if publisher is None else publisher.last_heartbeat_at,
        inactive_since=None if publisher is None else publisher.inactive_since,
        declared_runner=declared.runner,
    )


def virtual_model(publication: Publication, publisher: Publisher) -> Model:
    """A model that is only published."""
    return Model(
        manifest=publication.manifest,
        public=False,
        runner=publisher.name,
        status=model_status(publication.manifest, publisher),
        created_at=publication.created_at,
        last_heartbeat_at=publisher.last_heartbeat_at,
        inactive_since=publisher.inactive_since,
        declared_runner="",
    )


def public_agent(declared: DeclaredAgent, target: Status) -> Agent:
    """A declared agent; `target` is the status of the pool it points to."""
    return Agent(
        manifest=declared.manifest,
        public=True,
        runner="",
        status=target,
        created_at=declared.created_at,
        last_heartbeat_at=None,
        inactive_since=None,
    )


def virtual_agent(publication: AgentPublication, publisher: Publisher, target: Status) -> Agent:
    """A published agent; it answers only while its runner is there."""
    return Agent(
        manifest=publication.manifest,
        public=False,
        runner=publisher.name,
        status=target if publisher.active else Status.INACTIVE,
        created_at=publication.created_at,
        last_heartbeat_at=publisher.last_heartbeat_at,
        inactive_since=publisher.inactive_since,
    )
