"""The state of a watcher: resources from the snapshot and changes of RegistryService.Watch."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from weft.api.registry.v1 import (
    agent_pb2,
    alias_pb2,
    model_pb2,
    pool_pb2,
    profile_pb2,
    registry_service_pb2,
    route_pb2,
    runner_pb2,
    tenant_pb2,
    workflow_pb2,
)
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import AnyDocument, instance_of, model_document, observed_document, pool_document
from weft.kernel.names import is_resource_id

Key = tuple[ResourceKind, str]
_DELETIONS: Mapping[str, ResourceKind] = MappingProxyType(
    {
        f"deleted_{kind.value}": kind
        for kind in ResourceKind
        if kind not in (ResourceKind.MODEL, ResourceKind.RUNNER, ResourceKind.POOL)
    }
)
"""The changes by which a resource is gone that nothing else depends on."""


@dataclass(slots=True)
class MeshState:
    """The resources of a mesh by name, as of the last applied response."""

    runners: dict[str, runner_pb2.Runner] = field(default_factory=dict)
    models: dict[str, model_pb2.Model] = field(default_factory=dict)
    agents: dict[str, agent_pb2.Agent] = field(default_factory=dict)
    routes: dict[str, route_pb2.Route] = field(default_factory=dict)
    aliases: dict[str, alias_pb2.Alias] = field(default_factory=dict)
    profiles: dict[str, profile_pb2.Profile] = field(default_factory=dict)
    workflows: dict[str, workflow_pb2.RegisteredWorkflow] = field(default_factory=dict)
    tenants: dict[str, tenant_pb2.Tenant] = field(default_factory=dict)
    _of_pool: dict[str, set[str]] = field(default_factory=dict)
    """Names of the models of each pool."""
    _of_runner: dict[str, set[str]] = field(default_factory=dict)
    """Names of the models of each runner."""

    def fold(self, response: registry_service_pb2.WatchResponse) -> frozenset[Key]:
        """Applies a snapshot or a change; returns the resources whose document may have changed or disappeared."""
        if response.WhichOneof("kind") == "snapshot":
            before = set(self.keys())
            self._replace(response.snapshot)
            return frozenset(before | set(self.keys()))
        return frozenset(self._change(response.change))

    def keys(self) -> Iterator[Key]:
        """Yields every resource."""
        yield from ((ResourceKind.RUNNER, name) for name in self.runners)
        yield from ((ResourceKind.MODEL, name) for name in self.models)
        yield from ((ResourceKind.AGENT, name) for name in self.agents)
        yield from ((ResourceKind.POOL, name) for name in self._of_pool)
        yield from ((ResourceKind.ROUTE, name) for name in self.routes)
        yield from ((ResourceKind.ALIAS, name) for name in self.aliases)
        yield from ((ResourceKind.PROFILE, name) for name in self.profiles)
        yield from ((ResourceKind.WORKFLOW, name) for name in self.workflows)
        yield from ((ResourceKind.TENANT, name) for name in self.tenants)

    def __contains__(self, key: Key) -> bool:
        """Whether there is a resource of this kind and name."""
        return key[1] in self._known(key[0])

    def names(self, kind: ResourceKind) -> list[str]:
        """Returns the names of one kind, sorted."""
        return sorted(self._known(kind))

    def _known(self, kind: ResourceKind) -> Mapping[str, Any]:
        if kind is ResourceKind.POOL:
            return self._of_pool
        return self.models if kind is ResourceKind.MODEL else self._named(kind)

    def document(self, key: Key) -> AnyDocument | None:
        """Returns the current document of a resource, by its name or its id; None: it does not exist."""
        kind, name = key[0], self._name_of(*key)
        if kind is ResourceKind.POOL:
            members = [self.models[member] for member in self._of_pool.get(name, ())]
            return pool_document(pool_message(name, members)) if members else None
        if kind is ResourceKind.MODEL:
            model = self.models.get(name)
            runner = None if model is None else self.runners.get(model.runner)
            return None if model is None else model_document(model, instance_of(model, runner))
        message = self._named(kind).get(name)
        return None if message is None else observed_document(kind, message)

    def _name_of(self, kind: ResourceKind, text: str) -> str:
        """Returns the name for an id, and any other text as it is."""
        if not is_resource_id(text):
            return text
        identified: Mapping[ResourceKind, Mapping[str, Any]] = {
            ResourceKind.MODEL: self.models,
            ResourceKind.AGENT: self.agents,
            ResourceKind.ROUTE: self.routes,
        }
        return next((name for name, message in identified.get(kind, {}).items() if message.id == text), text)

    def documents(self, kind: ResourceKind) -> list[AnyDocument]:
        """Returns the resources of one kind, by name."""
        documents = (self.document((kind, name)) for name in self.names(kind))
        return [document for document in documents if document is not None]

    def _replace(self, snapshot: registry_service_pb2.Snapshot) -> None:
        self.runners = {watched.runner.name: watched.runner for watched in snapshot.runners}
        self.agents = {agent.manifest.name: agent for agent in snapshot.agents}
        self.routes = {route.manifest.name: route for route in snapshot.routes}
        self.aliases = {alias.manifest.name: alias for alias in snapshot.aliases}
        self.profiles = {profile.manifest.name: profile for profile in snapshot.profiles}
        self.workflows = {workflow.manifest.name: workflow for workflow in snapshot.workflows}
        self.tenants = {tenant.manifest.name: tenant for tenant in snapshot.tenants}
        self.models, self._of_pool, self._of_runner = {}, {}, {}
        for model in snapshot.models:
            self._put(model)

    def _change(self, change: registry_service_pb2.Change) -> Iterator[Key]:
        match change.WhichOneof("kind"):
            case "runner":
                runner = change.runner.runner
                self.runners[runner.name] = runner
                yield from self._runner_keys(runner.name)
            case "deleted_runner":
                self.runners.pop(change.deleted_runner, None)
                yield from self._runner_keys(change.deleted_runner)
            case "model":
                name = change.model.manifest.name
                yield from _model_keys(name, self._drop(name), change.model)
                self._put(change.model)
            case "deleted_model":
                yield from _model_keys(change.deleted_model, self._drop(change.deleted_model))
            case "agent" | "route" | "alias" | "profile" | "workflow" | "tenant" as kind:
                message = getattr(change, kind)
                self._named(ResourceKind(kind))[message.manifest.name] = message
                yield ResourceKind(kind), message.manifest.name
            case str(gone) if gone in _DELETIONS:
                name = getattr(change, gone)
                self._named(_DELETIONS[gone]).pop(name, None)
                yield _DELETIONS[gone], name

    def _named(self, kind: ResourceKind) -> dict[str, Any]:
        """Returns the resources of a kind that changes replace whole, by name."""
        named: Mapping[ResourceKind, dict[str, Any]] = {
            ResourceKind.RUNNER: self.runners,
            ResourceKind.AGENT: self.agents,
            ResourceKind.ROUTE: self.routes,
            ResourceKind.ALIAS: self.aliases,
            ResourceKind.PROFILE: self.profiles,
            ResourceKind.WORKFLOW: self.workflows,
            ResourceKind.TENANT: self.tenants,
        }
        return named[kind]

    def _runner_keys(self, name: str) -> Iterator[Key]:
        """Yields a runner and its models, because it reports their instances."""
        yield ResourceKind.RUNNER, name
        yield from ((ResourceKind.MODEL, model) for model in self._of_runner.get(name, ()))

    def _put(self, model: model_pb2.Model) -> None:
        name = model.manifest.name
        self.models[name] = model
        self._of_pool.setdefault(pool_of(model), set()).add(name)
        if model.runner:
            self._of_runner.setdefault(model.runner, set()).add(name)

    def _drop(self, name: str) -> model_pb2.Model | None:
        """Removes a model; returns it."""
        model = self.models.pop(name, None)
        if model is not None:
            _discard(self._of_pool, pool_of(model), name)
            _discard(self._of_runner, model.runner, name)
        return model


def pool_of(model: model_pb2.Model) -> str:
    """Returns the pool of a model."""
    return model.manifest.pool_name or model.manifest.name


def pool_message(name: str, members: Iterable[model_pb2.Model]) -> pool_pb2.Pool:
    """Returns the message of a pool of these models."""
    ordered = sorted(members, key=lambda model: model.manifest.name)
    return pool_pb2.Pool(
        name=name,
        explicit=any(model.manifest.pool_name for model in ordered),
        members=ordered,
        size=len(ordered),
        active_count=sum(model.status == model_pb2.Model.STATUS_ACTIVE for model in ordered),
    )


def _model_keys(name: str, *versions: model_pb2.Model | None) -> Iterator[Key]:
    """Yields a model, and its current and previous pools."""
    yield ResourceKind.MODEL, name
    yield from ((ResourceKind.POOL, pool_of(model)) for model in versions if model is not None)


def _discard(index: dict[str, set[str]], key: str, name: str) -> None:
    names = index.get(key, set())
    names.discard(name)
    if not names:
        index.pop(key, None)
