"""Declarations: their outcome, whether targets and candidates exist, and how they lie over publications."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from registry_svc.mesh.domain import (
    Agent,
    AgentManifest,
    AgentPublication,
    DeclaredAgent,
    DeclaredModel,
    Kind,
    Manifest,
    Model,
    ModelDeclaration,
    Outcome,
    Publication,
    RouteManifest,
    Status,
)
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Present state of the model or pool that an agent targets."""

    agent: AgentManifest
    model_known: bool
    """Whether there is a model of the target's name."""
    pool_members: Collection[str]
    """The members of the pool of the target's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Present state of the model or pool that a route names."""

    name: str
    model_known: bool
    """Whether there is a model of this name."""
    pool_members: Collection[str]
    """The members of the pool of this name."""

    def exists(self, *, arriving: Mapping[str, str], leaving: Collection[str]) -> bool:
        """Whether it exists once the models `arriving` (pool by name) were added and those `leaving` removed."""
        if self.name in arriving or self.name in arriving.values():
            return True
        if self.model_known and self.name not in leaving:
            return True
        return any(member not in leaving and member not in arriving for member in self.pool_members)


def exists(target: Target, *, arriving: Mapping[str, str], leaving: Collection[str]) -> bool:
    """Whether the target exists once the models `arriving` (pool by name) were added and those `leaving` removed."""
    name = target.agent.target
    if not target.agent.targets_pool:
        return name in arriving or (target.model_known and name not in leaving)
    if name in arriving.values():
        return True
    return any(member not in leaving and member not in arriving for member in target.pool_members)


def require_target(target: Target, *, arriving: Mapping[str, str], leaving: Collection[str]) -> None:
    """Raise MODEL_NOT_FOUND when the target of an agent does not exist."""
    if exists(target, arriving=arriving, leaving=leaving):
        return
    kind = "pool" if target.agent.targets_pool else "model"
    raise WeftError(
        Reason.MODEL_NOT_FOUND,
        f"the agent {target.agent.name!r} points to the {kind} {target.agent.target!r}, which is neither known nor in "
        f"this call; name one that exists, or send the {kind} along",
        metadata={"agent": target.agent.name, kind: target.agent.target},
    )


def require_candidates(route: str, candidates: Sequence[Candidate], *, arriving: Mapping[str, str]) -> None:
    """Raise MODEL_NOT_FOUND when a route would name something that is not there."""
    for candidate in candidates:
        if not candidate.exists(arriving=arriving, leaving=()):
            raise WeftError(
                Reason.MODEL_NOT_FOUND,
                f"the route {route!r} names {candidate.name!r}, which is neither a model nor a pool that is known or "
                "in this call; name one that exists, or send it along",
                metadata={"route": route, "candidate": candidate.name},
            )


MAX_LISTED_NAMES = 10


def decide_model(
    given: ModelDeclaration,
    *,
    view: Model | None,
    declared: DeclaredModel | None,
    publication: Publication | None,
    publisher_live: bool,
    adopt: bool,
) -> Outcome:
    """Return the outcome for a model; raises ALREADY_EXISTS when a live runner publishes it differently.

    The readable form of a public model may hold facts of its publication; declaring exactly that changes nothing.
    """
    if declared is not None:
        pinned_alike = given.runner == declared.runner
        same = given.manifest == declared.manifest or (view is not None and given.manifest == view.manifest)
        return Outcome.UNCHANGED if pinned_alike and same else Outcome.CONFIGURED
    if publication is None:
        return Outcome.CREATED
    same = given.manifest == publication.manifest and given.runner in {"", publication.runner}
    return _of_virtual(Kind.MODEL, given.manifest.name, publication.runner, same, publisher_live, adopt)


def decide_agent(
    given: AgentManifest,
    *,
    declared: DeclaredAgent | None,
    publication: AgentPublication | None,
    publisher_live: bool,
    adopt: bool,
) -> Outcome:
    """Return the outcome for an agent; raises ALREADY_EXISTS when a live runner publishes it differently."""
    if declared is not None:
        return Outcome.UNCHANGED if given == declared.manifest else Outcome.CONFIGURED
    if publication is None:
        return Outcome.CREATED
    same = given == publication.manifest
    return _of_virtual(Kind.AGENT, given.name, publication.runner, same, publisher_live, adopt)


def decide_route(given: RouteManifest, declared: RouteManifest | None) -> Outcome:
    """Return the outcome for a route; no runner publishes routes."""
    if declared is None:
        return Outcome.CREATED
    return Outcome.UNCHANGED if given == declared else Outcome.CONFIGURED


def in_use(kind: Kind, name: str, agents: Collection[str], routes: Collection[str] = ()) -> WeftError:
    """Return the refusal to delete a resource that `agents` target or `routes` name; one of them is not empty."""
    users = {Kind.AGENT: sorted(agents), Kind.ROUTE: sorted(routes)}
    listed = [f"{user.value}s: {_listed(names)}" for user, names in users.items() if names]
    named = {f"{user.value}s": ",".join(names[:MAX_LISTED_NAMES]) for user, names in users.items() if names}
    return WeftError(
        Reason.RESOURCE_IN_USE,
        f"the {kind.value} {name!r} is in use by {'; by '.join(listed)}; delete them or point them elsewhere",
        metadata={kind.value: name, **named},
    )


def still_loaded(kind: Kind, name: str, runner: str, models: Sequence[str]) -> WeftError:
    """Return the refusal to delete what a live runner has loaded: its engines would hold memory without an owner."""
    if kind is Kind.RUNNER:
        what = f"the runner {name!r} is live and has {_listed(sorted(models))} loaded; stop it or unload them first"
    else:
        what = (
            f"the model {name!r} is published by the live runner {runner!r} and loaded there; unload it "
            f"(`weft unload {name}`), or remove it from that runner's weft.yaml"
        )
    return WeftError(
        Reason.RESOURCE_IN_USE,
        f"{what}, or delete with force (`--force`, or `?force=true` over HTTP), which unloads first",
        metadata={kind.value: name, "runner": runner, "loaded": ",".join(sorted(models)[:MAX_LISTED_NAMES])},
    )


def _listed(names: list[str]) -> str:
    some = ", ".join(names[:MAX_LISTED_NAMES])
    return f"{some} and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else some


def _of_virtual(kind: Kind, name: str, runner: str, same: bool, publisher_live: bool, adopt: bool) -> Outcome:
    if adopt:
        return Outcome.CONFIGURED
    if same:
        return Outcome.UNCHANGED
    if publisher_live:
        raise WeftError(
            Reason.ALREADY_EXISTS,
            f"the {kind.value} {name!r} is published by the runner {runner!r} and differs from this declaration; "
            "adopt it (`weft apply --adopt`, or `adopt: true` over HTTP) to take it over",
            metadata={"owner_kind": kind.value, kind.value: name, "runner": runner},
        )
    return Outcome.CONFIGURED


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
