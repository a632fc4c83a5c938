"""The mesh in memory: sessions, declarations and pools, and the changes that each step publishes.

Without await, clock or storage: session manager and declarations decide, this module records.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Any

from google.protobuf.message import Message

from registry_svc.mesh.indexes import IdIndex, ManifestSizes, PoolIndex, RouteIndex, TargetIndex
from registry_svc.mesh.overlay import (
    is_alike,
    is_unchanged,
    may_serve,
    public_agent,
    public_model,
    virtual_agent,
    virtual_model,
)
from registry_svc.mesh.policy.declarations import Target
from registry_svc.mesh.session_state import SessionState
from weft.api.registry.v1 import agent_pb2, model_pb2, pool_pb2, route_pb2, runner_pb2, workflow_pb2
from weft.api.registry.v1.registry_service_pb2 import Change
from weft.api.registry.v1.resource_pb2 import ResourceDocument
from weft.documents.kind import DeclaredKind, Reference
from weft.documents.kinds import DECLARED_KINDS, Key, key_of, packed
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import AnyDocument
from weft.kernel.values.names import with_twin

Record = Any
"""A message of a declared kind, such as an Alias."""


class DeclaredDocuments:
    """The declared and configured documents of one kind, by name. Documents are immutable, but can be replaced."""

    def __init__(self, kind: DeclaredKind) -> None:
        self._kind = kind
        self._declared: dict[str, Record] = {}
        self._configured: dict[str, Record] = {}
        self.shown: Mapping[str, Record] = self._declared
        """The effective documents: declared ones, and configured ones unless a declared one has the same name or scope.
        A new mapping after each change."""

    def __len__(self) -> int:
        """Returns the number of declared documents."""
        return len(self._declared)

    def __contains__(self, name: object) -> bool:
        """Whether a document with this name is declared."""
        return name in self._declared

    def declared(self, name: str) -> Record | None:
        """Returns the declared document with this name, or None."""
        return self._declared.get(name)

    def all_declared(self) -> list[Record]:
        """Returns the declared documents, sorted by name."""
        return [self._declared[name] for name in sorted(self._declared)]

    def same_scope(self, manifest: Any) -> str:
        """Returns the name of another declared document with the same scope, or ""."""
        scope = self._kind.scope(manifest)
        found = (name for name in self._declared if name != manifest.name)
        return next((name for name in found if self._kind.scope(self._declared[name].manifest) == scope), "")

    def referring(self, is_meant: Callable[[Reference], bool]) -> set[str]:
        """Returns the names of declared documents with a reference for which `is_meant` is true."""
        return {
            name
            for name, record in self._declared.items()
            if any(map(is_meant, self._kind.references_of(record.manifest)))
        }

    def configure(self, records: Iterable[Record]) -> None:
        """Replaces the documents of the configuration."""
        self._configured = {record.manifest.name: record for record in records}
        self._refresh()

    def replace(self, new: Iterable[Record], gone: Iterable[str]) -> None:
        """Adds or replaces documents by name, and removes others. Ignores unknown names."""
        removed = frozenset(gone)
        kept = {name: record for name, record in self._declared.items() if name not in removed}
        self._declared = kept | {record.manifest.name: record for record in new}
        self._refresh()

    def _refresh(self) -> None:
        if not self._configured:
            self.shown = self._declared
            return
        taken = {self._kind.scope(record.manifest) for record in self._declared.values()}
        below = {
            name: record
            for name, record in self._configured.items()
            if self._kind.scope(record.manifest) not in taken and name not in self._declared
        }
        self.shown = below | self._declared


INDEXED_KINDS = (ResourceKind.MODEL, ResourceKind.AGENT, ResourceKind.ROUTE)
"""Kinds that runners also publish, or with a status that depends on runners."""


class ResourceIndex:
    """Lookups of sessions, models, agents, pools and routes, with declarations over publications."""

    def __init__(self) -> None:
        self._by_session: dict[str, SessionState] = {}
        self._by_runner: dict[str, SessionState] = {}
        self._by_model: dict[str, SessionState] = {}
        self._by_agent: dict[str, SessionState] = {}
        self.documents = {kind: DeclaredDocuments(each) for kind, each in DECLARED_KINDS.items()}
        self.central_models: dict[str, model_pb2.ModelManifest] = {}
        """Declared models with a provider, by name. Read-only."""
        self.pools = PoolIndex()
        self.targets = TargetIndex(self.pools)
        self.routes = RouteIndex(self.pools)
        self.sizes = ManifestSizes()
        self.ids = IdIndex()
        self.detail_bytes = 0
        """Total size of the detail texts in reports."""

    def __len__(self) -> int:
        return len(self._by_runner)

    def __iter__(self) -> Iterator[SessionState]:
        return iter(self._by_runner.values())

    def of_session(self, session_id: str) -> SessionState | None:
        """Returns the state of a session, or None."""
        return self._by_session.get(session_id)

    def of_runner(self, name: str) -> SessionState | None:
        """Returns the session of a runner, or None."""
        return self._by_runner.get(name)

    def names_of(self, kind: ResourceKind) -> Iterable[str]:
        """Returns the names of all resources of a kind."""
        match kind:
            case ResourceKind.RUNNER:
                return self._by_runner.keys()
            case ResourceKind.POOL:
                return self.pools.names()
            case ResourceKind.MODEL:
                return self._by_model.keys() | self.documents[kind].shown.keys()
            case ResourceKind.AGENT:
                return self._by_agent.keys() | self.documents[kind].shown.keys()
        return self.documents[kind].shown.keys()

    def count(self, kind: ResourceKind) -> int:
        """Returns the number of resources of a declared kind, without configured ones."""
        published: Mapping[ResourceKind, Sized] = {ResourceKind.MODEL: self.pools, ResourceKind.AGENT: self.targets}
        return len(published[kind] if kind in published else self.documents[kind])

    def stands_for(self, kind: ResourceKind, name: str) -> Iterable[str]:
        """Returns the names for which a resource answers besides its own: a model's pool, an alias's pattern."""
        if kind is ResourceKind.MODEL:
            pool = self.pools.pool_of(name)
            return () if pool is None else (pool,)
        alias = self.documents[kind].shown.get(name) if kind is ResourceKind.ALIAS else None
        return () if alias is None else (alias.manifest.pattern,)

    def declared_instead(self, names: Collection[str]) -> dict[str, str]:
        """Returns which names of listed models an operator has declared for something else, and for what, in words.

        Aliases with `*` are for names that no model has.
        """
        found: dict[str, str] = {}
        for kind in (kind for kind, each in DECLARED_KINDS.items() if each.shares_namespace):
            found |= {name: f"a declared {kind.value}" for name in names if self.is_declared(kind, name)}
        for alias in (each.manifest for each in self.documents[ResourceKind.ALIAS].shown.values()):
            twins = (name for name in with_twin(alias.pattern) if name in names and name != alias.target)
            found |= dict.fromkeys(twins, "an alias")
        return {name: what for name, what in found.items() if not self.is_declared(ResourceKind.MODEL, name)}

    def declared_model(self, name: str) -> model_pb2.Model | None:
        """Returns the declaration of a model, or None."""
        return self.documents[ResourceKind.MODEL].declared(name)

    def is_declared(self, kind: ResourceKind, name: str) -> bool:
        """Whether an operator has declared a resource."""
        return kind in self.documents and name in self.documents[kind]

    def published_model(self, name: str) -> tuple[model_pb2.Model, SessionState] | None:
        """Returns the publication of a model, even if a declaration overrides it."""
        state = self._by_model.get(name)
        return None if state is None else (state.publications[name].message(), state)

    def publisher_of(self, model: str) -> SessionState | None:
        """Returns the session that publishes a model, even if a declaration overrides it."""
        return self._by_model.get(model)

    def published_agent(self, name: str) -> tuple[agent_pb2.Agent, SessionState] | None:
        """Returns the publication of an agent, even if a declaration overrides it."""
        state = self._by_agent.get(name)
        return None if state is None else (state.agents[name], state)

    def model(self, name: str) -> model_pb2.Model | None:
        """Returns a model, or None."""
        make = self.deferred_model(name)
        return None if make is None else make()

    def deferred_model(self, name: str) -> Callable[[], model_pb2.Model] | None:
        """Returns a function that builds a model in its current state, also later; None if it does not exist."""
        declared, state = self.declared_model(name), self._by_model.get(name)
        if declared is None:
            return None if state is None else partial(virtual_model, state.publications[name], state.publisher())
        if state is None or not may_serve(declared, state.profile.name):
            return partial(public_model, declared, None, None)
        return partial(public_model, declared, state.publications[name], state.publisher())

    def deferred_resources(self) -> Iterator[Callable[[], ResourceDocument]]:
        """Yields a function per resource that builds it in its current state, also later."""
        makers: Mapping[ResourceKind, Callable[[str], Callable[[], Message] | None]] = {
            ResourceKind.MODEL: self.deferred_model,
            ResourceKind.AGENT: self.deferred_agent,
            ResourceKind.ROUTE: self.routes.deferred,
        }
        for kind, make_of in makers.items():
            yield from (
                partial(_packed, kind, make) for name in self.names_of(kind) if (make := make_of(name)) is not None
            )
        for kind in self.documents.keys() - makers.keys():
            yield from (partial(packed, kind, each) for _, each in sorted(self.documents[kind].shown.items()))

    def unowned_on(self, model: str) -> str | None:
        """Returns the active runner that has a model loaded but no longer publishes it, or None."""
        holding = (state for state in self if state.pulse.active and model in state.unowned)
        return next((state.profile.name for state in holding), None)

    def agent(self, name: str) -> agent_pb2.Agent | None:
        """Returns an agent, or None."""
        make = self.deferred_agent(name)
        return None if make is None else make()

    def deferred_agent(self, name: str) -> Callable[[], agent_pb2.Agent] | None:
        """Returns a function that builds an agent in its current state, also later; None if it does not exist."""
        declared, state = self.documents[ResourceKind.AGENT].declared(name), self._by_agent.get(name)
        if declared is not None:
            return partial(public_agent, declared, self.targets.status(declared.manifest))
        if state is None:
            return None
        publication = state.agents[name]
        return partial(virtual_agent, publication, state.publisher(), self.targets.status(publication.manifest))

    def pool(self, name: str) -> pool_pb2.Pool | None:
        """Returns a pool, or None."""
        members = self.pools.members(name)
        if not members:
            return None
        models = [model for member in sorted(members) if (model := self.model(member)) is not None]
        return pool_pb2.Pool(
            name=name,
            explicit=self.pools.is_explicit(name),
            members=models,
            size=len(models),
            active_count=sum(model.status == model_pb2.Model.STATUS_ACTIVE for model in models),
        )

    def target(self, name: str) -> Target:
        """Returns the state of the model or pool with this name."""
        return Target(
            name=name, model_known=self.pools.pool_of(name) is not None, pool_members=self.pools.members(name)
        )

    def _withdraw(self, models: Iterable[str], agents: Iterable[str]) -> None:
        for name in models:
            if (holder := self._by_model.pop(name, None)) is not None:
                holder.withdraw(name)
        for name in agents:
            if (holder := self._by_agent.pop(name, None)) is not None:
                del holder.agents[name]

    def _add(self, state: SessionState) -> None:
        self.detail_bytes += state.detail_bytes
        self._by_session[state.session.id] = state
        self._by_runner[state.profile.name] = state
        self._by_model |= dict.fromkeys(state.publications, state)
        self._by_agent |= dict.fromkeys(state.agents, state)

    def _remove(self, state: SessionState) -> None:
        self.detail_bytes -= state.detail_bytes
        del self._by_session[state.session.id]
        del self._by_runner[state.profile.name]
        for name in state.publications:
            del self._by_model[name]
        for name in state.agents:
            del self._by_agent[name]


class Mesh(ResourceIndex):
    """The mesh in memory. Each step returns the changes for watchers, deletions first."""

    def install(self, state: SessionState, evicted: Iterable[str] = ()) -> list[Change]:
        """Installs `state` in place of its session's earlier incarnation and of the `evicted` sessions (by id).

        Withdraws its models and agents from earlier publishers.
        """
        gone_runners: dict[str, None] = {}
        models, agents = dict.fromkeys(state.publications), dict.fromkeys(state.agents)
        for session_id in (state.session.id, *evicted):
            earlier = self._by_session.get(session_id)
            if earlier is not None:
                self._remove(earlier)
                gone_runners[earlier.profile.name] = None
                models |= dict.fromkeys(earlier.publications)
                agents |= dict.fromkeys(earlier.agents)
        self._withdraw(state.publications, state.agents)
        self._add(state)
        gone_runners.pop(state.profile.name, None)
        return self._changes([state], models, agents, gone_runners=gone_runners)

    def forget(self, members: Sequence[SessionState]) -> list[Change]:
        """Removes `members`. The changes have agents before models before runners."""
        models: dict[str, None] = {}
        agents: dict[str, None] = {}
        for state in members:
            self._remove(state)
            models |= dict.fromkeys(state.publications)
            agents |= dict.fromkeys(state.agents)
        return self._changes([], models, agents, gone_runners=[state.profile.name for state in members])

    def report(self, state: SessionState, capability: runner_pb2.Capability) -> None:
        """Records a capability report of a runner."""
        self.detail_bytes -= state.detail_bytes
        state.report(capability)
        self.detail_bytes += state.detail_bytes

    def changes_for(self, members: Sequence[SessionState]) -> list[Change]:
        """Returns the changes after the runners of `members` became active or inactive."""
        models = dict.fromkeys(name for state in members for name in state.publications)
        agents = dict.fromkeys(name for state in members for name in state.agents)
        return self._changes(members, models, agents)

    def changes_for_report(self, state: SessionState, models: Iterable[str]) -> list[Change]:
        """Returns the changes after a report in which these models fell asleep, woke up, or changed their runtime."""
        return self._changes([state], dict.fromkeys(models), {})

    def declare(self, records: Iterable[Message]) -> list[Change]:
        """Adds or replaces declarations."""
        by_kind: dict[ResourceKind, list[Any]] = {kind: [] for kind in self.documents}
        for record in records:
            by_kind[key_of(record)[0]].append(record)
        for model in by_kind[ResourceKind.MODEL]:
            self.central_models.pop(model.manifest.name, None)
            if model.manifest.HasField("provider"):
                self.central_models[model.manifest.name] = model.manifest
        for route in by_kind[ResourceKind.ROUTE]:
            self.routes.put(route)
        for kind in INDEXED_KINDS:
            self.documents[kind].replace(by_kind[kind], ())
        changes = self._changes([], *(_names(by_kind[kind]) for kind in INDEXED_KINDS))
        for kind in self.documents.keys() - set(INDEXED_KINDS):
            changes += self._replaced(kind, by_kind[kind], ())
        return changes

    def drop(self, keys: Iterable[Key]) -> list[Change]:
        """Removes declared documents, and published models and agents."""
        by_kind: dict[ResourceKind, dict[str, None]] = {kind: {} for kind in self.documents}
        for kind, name in keys:
            by_kind[kind][name] = None
        changes: list[Change] = []
        for kind in self.documents.keys() - set(INDEXED_KINDS):
            changes += self._replaced(kind, (), by_kind[kind])
        for route in by_kind[ResourceKind.ROUTE]:
            self.routes.drop(route)
        for model in by_kind[ResourceKind.MODEL]:
            self.central_models.pop(model, None)
        for kind in INDEXED_KINDS:
            self.documents[kind].replace((), by_kind[kind])
        self._withdraw(by_kind[ResourceKind.MODEL], by_kind[ResourceKind.AGENT])
        return changes + self._changes([], *(by_kind[kind] for kind in INDEXED_KINDS))

    def configure(self, kind: ResourceKind, records: Iterable[Message]) -> list[Change]:
        """Replaces the documents of the configuration."""
        before = self.documents[kind].shown
        self.documents[kind].configure(records)
        return self._shown_changes(kind, before)

    def _replaced(self, kind: ResourceKind, new: Sequence[Any], gone: Iterable[str]) -> list[Change]:
        """Replaces and removes documents. The changes include configured ones that become hidden or visible."""
        before = self.documents[kind].shown
        self.documents[kind].replace(new, gone)
        for record in new:
            self.sizes.put(kind, record.manifest.name, record.manifest)
        for name in gone:
            self.sizes.drop(kind, name)
        return self._shown_changes(kind, before)

    def _shown_changes(self, kind: ResourceKind, before: Mapping[str, Any]) -> list[Change]:
        """Returns the changes from the documents that were effective before to the current ones."""
        after = self.documents[kind].shown
        return [
            *(_gone(kind, name) for name in sorted(before.keys() - after.keys())),
            *(_put(kind, after[name]) for name in sorted(after) if after[name] is not before.get(name)),
        ]

    def shown_workflow(self, name: str) -> workflow_pb2.RegisteredWorkflow | None:
        """Returns a workflow with its current status, or None."""
        workflow = self.documents[ResourceKind.WORKFLOW].declared(name)
        if workflow is None:
            return None
        shown = workflow_pb2.RegisteredWorkflow()
        shown.CopyFrom(workflow)
        shown.status = workflow_pb2.RegisteredWorkflow.Status.ValueType(
            self.routes.status(route_pb2.RouteManifest(candidates=[workflow.manifest.model]))
            if self.pools.pool_of(workflow.manifest.model) is not None or self.pools.members(workflow.manifest.model)
            else workflow_pb2.RegisteredWorkflow.STATUS_INACTIVE
        )
        return shown

    def is_declared_as(self, expected: AnyDocument) -> bool:
        """Whether declaring this would change nothing; True for runners and pools, which are not declared."""
        kind, name = expected.kind, expected.name
        if kind is ResourceKind.MODEL:
            publication, _ = self.published_model(name) or (None, None)
            view, declared = self.model(name), self.declared_model(name)
            return is_unchanged(expected.declared, view=view, declared=declared, publication=publication)
        if kind not in self.documents:
            return True
        found = self.agent(name) if kind is ResourceKind.AGENT else self.documents[kind].shown.get(name)
        return found is not None and is_alike(found.manifest, expected.declared)

    def _changes(
        self,
        members: Sequence[SessionState],
        models: Mapping[str, None],
        agents: Mapping[str, None],
        routes: Iterable[str] = (),
        *,
        gone_runners: Iterable[str] = (),
    ) -> list[Change]:
        """Returns a step's changes: agents and routes are deleted before models and runners, and added after them."""
        concerned = self._routes_over(models)
        gone_models, new_models, touched_pools = self._settled(ResourceKind.MODEL, models)
        gone_agents, new_agents, _ = self._settled(ResourceKind.AGENT, agents)
        for name in self.targets.affected(models, touched_pools) - agents.keys():
            agent = self.agent(name)
            if agent is not None and self.targets.put(agent.manifest, agent.status):
                new_agents[name] = agent
        gone_routes, new_routes, _ = self._settled(ResourceKind.ROUTE, routes)
        for name in concerned | self._routes_over(models):
            route = self.routes.get(name)
            if route is not None and self.routes.note_status(route):
                new_routes[name] = route
        return [
            *(_gone(ResourceKind.ROUTE, name) for name in gone_routes),
            *(_gone(ResourceKind.AGENT, name) for name in gone_agents),
            *(_gone(ResourceKind.MODEL, name) for name in gone_models),
            *(Change(deleted_runner=name) for name in gone_runners),
            *_with_their_models(members, new_models),
            *(_put(ResourceKind.AGENT, agent) for agent in new_agents.values()),
            *(_put(ResourceKind.ROUTE, route) for route in new_routes.values()),
        ]

    def _settled(self, kind: ResourceKind, names: Iterable[str]) -> tuple[list[str], dict[str, Any], set[str]]:
        """Updates the indexes. Returns deleted names, current resources by name, and pools with a new status."""
        shown = {ResourceKind.MODEL: self.model, ResourceKind.AGENT: self.agent, ResourceKind.ROUTE: self.routes.get}
        gone, new, pools = list[str](), dict[str, Any](), set[str]()
        for name in names:
            found: Any = shown[kind](name)
            if kind is ResourceKind.MODEL:
                pools |= self.pools.drop(name) if found is None else self.pools.put(found.manifest, found.status)
            if found is None:
                gone.append(name)
                self.sizes.drop(kind, name)
                self.ids.drop(kind, name)
                if kind is ResourceKind.AGENT:
                    self.targets.drop(name)
                continue
            new[name] = found
            self.sizes.put(kind, name, found.manifest)
            self.ids.put(kind, name, found.id)
            if kind is ResourceKind.AGENT:
                self.targets.put(found.manifest, found.status)
            elif kind is ResourceKind.ROUTE:
                self.routes.note_status(found)
        return gone, new, pools

    def _routes_over(self, models: Iterable[str]) -> set[str]:
        """Returns the routes that name one of these models or its pool."""
        if not self.routes:
            return set()
        pools = (pool for model in models if (pool := self.pools.pool_of(model)) is not None)
        return self.routes.naming([*models, *pools])


def _with_their_models(members: Sequence[SessionState], models: dict[str, model_pb2.Model]) -> Iterator[Change]:
    """Yields each runner before its models, which refer to it; then models without a runner."""
    rest = dict(models)
    for state in members:
        yield Change(runner=state.runner())
        own = [name for name in state.publications if name in rest] if rest else []
        yield from (_put(ResourceKind.MODEL, rest.pop(name)) for name in own)
    yield from (_put(ResourceKind.MODEL, model) for model in rest.values())


def _packed(kind: ResourceKind, make: Callable[[], Message]) -> ResourceDocument:
    return packed(kind, make())


def _put(kind: ResourceKind, record: Message) -> Change:
    return Change(resource=packed(kind, record))


def _gone(kind: ResourceKind, name: str) -> Change:
    return Change(deleted_resource=ResourceDocument(kind=kind.value, name=name))


def _names(records: Iterable[Any]) -> dict[str, None]:
    return {record.manifest.name: None for record in records}
