"""Indexes of models, pools, agents, routes and their sizes, updated one resource at a time."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from registry_svc.mesh.overlay import shown_route
from registry_svc.mesh.records import manifest_bytes, pool_name_of
from registry_svc.mesh.states import Status
from weft.api.registry.v1 import agent_pb2, model_pb2, route_pb2
from weft.dispatch.agents import target_of
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.values.names import is_resource_id

if TYPE_CHECKING:
    from weft.documents.kinds import Key


@dataclass(slots=True)
class _Tally:
    """A pool: its members, and their number by status."""

    statuses: dict[str, Status] = field(default_factory=dict)
    counts: dict[Status, int] = field(default_factory=lambda: dict.fromkeys(Status, 0))
    naming: int = 0
    """Number of members that name the pool."""

    @property
    def status(self) -> Status:
        if self.counts[Status.ACTIVE]:
            return Status.ACTIVE
        return Status.HIBERNATING if self.counts[Status.HIBERNATING] else Status.INACTIVE

    def add(self, model: str, status: Status, *, names_it: bool) -> None:
        self.statuses[model] = status
        self.counts[status] += 1
        self.naming += names_it

    def remove(self, model: str, *, names_it: bool) -> None:
        self.counts[self.statuses.pop(model)] -= 1
        self.naming -= names_it


class IdIndex:
    """Names of models, agents and routes by id."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._ids: dict[tuple[ResourceKind, str], str] = {}

    def put(self, kind: ResourceKind, name: str, id_: str) -> None:
        """Sets the id of a name."""
        if self._ids.get((kind, name)) != id_:
            self.drop(kind, name)
            self._ids[kind, name] = id_
            self._names[id_] = name

    def drop(self, kind: ResourceKind, name: str) -> None:
        """Removes a name."""
        self._names.pop(self._ids.pop((kind, name), ""), None)

    def name_of(self, text: str) -> str:
        """Returns the name of the resource with this id; any other text unchanged."""
        return self._names.get(text, text) if is_resource_id(text) else text


class PoolIndex:
    """All pools. A model is in the pool that it names, or in the pool with its name."""

    def __init__(self) -> None:
        self._pools: dict[str, _Tally] = {}
        self._pool_of: dict[str, tuple[str, bool]] = {}

    def __len__(self) -> int:
        """Returns the number of models."""
        return len(self._pool_of)

    def put(self, manifest: model_pb2.ModelManifest, status: int) -> set[str]:
        """Adds or updates a model. Returns the pools with a changed status."""
        return self._move(manifest.name, (pool_name_of(manifest), bool(manifest.pool_name)), Status(status))

    def drop(self, model: str) -> set[str]:
        """Removes a model. Returns the pools with a changed status."""
        return self._move(model, None, Status.INACTIVE)

    def names(self) -> Iterable[str]:
        """Returns the names of all pools."""
        return self._pools.keys()

    def pool_of(self, model: str) -> str | None:
        """Returns the pool of a model; None for an unknown model."""
        pool = self._pool_of.get(model)
        return None if pool is None else pool[0]

    def members(self, pool: str) -> Mapping[str, Status]:
        """Returns the statuses of a pool's members by name; empty if there is no such pool."""
        tally = self._pools.get(pool)
        return {} if tally is None else tally.statuses

    def naming(self, pool: str) -> list[str]:
        """Returns the members that name this pool."""
        return [model for model in self.members(pool) if self._pool_of[model][1]] if self.is_explicit(pool) else []

    def is_explicit(self, pool: str) -> bool:
        """Whether a member names the pool."""
        tally = self._pools.get(pool)
        return tally is not None and tally.naming > 0

    def status(self, pool: str) -> Status:
        """Returns ACTIVE if a member is active, otherwise HIBERNATING if one is hibernating, otherwise INACTIVE."""
        tally = self._pools.get(pool)
        return Status.INACTIVE if tally is None else tally.status

    def _move(self, model: str, pool: tuple[str, bool] | None, status: Status) -> set[str]:
        """Moves a model to a pool, with whether it names the pool; None removes it."""
        earlier = self._pool_of.get(model)
        if pool is not None and earlier == pool:
            return self._restate(model, pool[0], status)
        touched = {found[0] for found in (earlier, pool) if found is not None}
        before = {pool: self.status(pool) for pool in touched}
        if earlier is not None:
            self._remove(model, *earlier)
        if pool is not None:
            self._pool_of[model] = pool
            self._pools.setdefault(pool[0], _Tally()).add(model, status, names_it=pool[1])
        return {pool for pool in touched if self.status(pool) is not before[pool]}

    def _restate(self, model: str, pool: str, status: Status) -> set[str]:
        # When a site goes silent, thousands of models change: this avoids removing and adding each.
        tally = self._pools[pool]
        before = tally.status
        tally.counts[tally.statuses[model]] -= 1
        tally.counts[status] += 1
        tally.statuses[model] = status
        return set() if tally.status is before else {pool}

    def _remove(self, model: str, pool: str, names_it: bool) -> None:
        del self._pool_of[model]
        tally = self._pools[pool]
        tally.remove(model, names_it=names_it)
        if not tally.statuses:
            del self._pools[pool]


_Target = tuple[str, bool]


class TargetIndex:
    """Agents by target, with their last published status."""

    def __init__(self, pools: PoolIndex) -> None:
        self._pools = pools
        self._published: dict[str, tuple[_Target, int]] = {}
        self._agents: dict[_Target, set[str]] = {}

    def __len__(self) -> int:
        return len(self._published)

    def put(self, manifest: agent_pb2.AgentManifest, status: int) -> bool:
        """Adds or updates an agent. Returns whether its status has changed."""
        published = self._published.get(manifest.name)
        self.drop(manifest.name)
        target = target_of(manifest)
        self._published[manifest.name] = (target, status)
        self._agents.setdefault(target, set()).add(manifest.name)
        return published is None or published[1] != status

    def drop(self, agent: str) -> None:
        """Removes an agent. Ignores an unknown name."""
        published = self._published.pop(agent, None)
        if published is None:
            return
        agents = self._agents[published[0]]
        agents.discard(agent)
        if not agents:
            del self._agents[published[0]]

    def status(self, manifest: agent_pb2.AgentManifest) -> Status:
        """Returns the status of an agent's pool; INACTIVE if there is none."""
        name, is_pool = target_of(manifest)
        pool = name if is_pool else self._pools.pool_of(name)
        return Status.INACTIVE if pool is None else self._pools.status(pool)

    def of_model(self, model: str) -> set[str]:
        """Returns the agents that point to this model by name."""
        return self._agents.get((model, False), set())

    def of_pool(self, pool: str) -> set[str]:
        """Returns the agents that point to this pool by name."""
        return self._agents.get((pool, True), set())

    def affected(self, models: Iterable[str], pools: Iterable[str]) -> set[str]:
        """Returns the agents that may be affected by changes of these models and pool statuses."""
        if not self._agents:
            return set()
        found = set[str]().union(*(self.of_model(model) for model in models))
        for pool in pools:
            found |= self.of_pool(pool)
            members = self._pools.members(pool)
            # Iterate over the shorter one: a pool may have thousands of members, and a mesh thousands of agents.
            if len(members) <= len(self._agents):
                found = found.union(*(self.of_model(model) for model in members))
            else:
                targets = (target for target, is_pool in self._agents if not is_pool and target in members)
                found = found.union(*(self.of_model(target) for target in targets))
        return found


class RouteIndex:
    """Routes by candidate, with their last published status."""

    def __init__(self, pools: PoolIndex) -> None:
        self._pools = pools
        self._declared: dict[str, route_pb2.Route] = {}
        self._published: dict[str, int] = {}
        self._naming: dict[str, set[str]] = {}
        """Routes by the name of a candidate model or pool."""

    def __len__(self) -> int:
        return len(self._declared)

    def get(self, name: str) -> route_pb2.Route | None:
        """Returns the route with this name, or None."""
        make = self.deferred(name)
        return None if make is None else make()

    def deferred(self, name: str) -> Callable[[], route_pb2.Route] | None:
        """Returns a function that builds the route in its current state, also later; None if it does not exist."""
        declared = self._declared.get(name)
        return None if declared is None else partial(shown_route, declared, self.status(declared.manifest))

    def put(self, declared: route_pb2.Route) -> None:
        """Adds or replaces a route."""
        name = declared.manifest.name
        self.drop(name)
        self._declared[name] = declared
        for candidate in declared.manifest.candidates:
            self._naming.setdefault(candidate, set()).add(name)

    def drop(self, name: str) -> None:
        """Removes a route. Ignores an unknown name."""
        declared = self._declared.pop(name, None)
        self._published.pop(name, None)
        if declared is None:
            return
        for candidate in declared.manifest.candidates:
            routes = self._naming[candidate]
            routes.discard(name)
            if not routes:
                del self._naming[candidate]

    def note_status(self, route: route_pb2.Route) -> bool:
        """Records the published status. Returns whether it has changed."""
        earlier = self._published.get(route.manifest.name)
        self._published[route.manifest.name] = route.status
        return earlier != route.status

    def naming(self, names: Iterable[str]) -> set[str]:
        """Returns the routes that name one of these models or pools."""
        return set[str]().union(*(self._naming.get(name, ()) for name in names))

    def status(self, manifest: route_pb2.RouteManifest) -> Status:
        """Returns ACTIVE if a candidate is active, otherwise HIBERNATING if one is hibernating, otherwise INACTIVE."""
        statuses = {self._status_of(name) for name in manifest.candidates}
        for status in (Status.ACTIVE, Status.HIBERNATING):
            if status in statuses:
                return status
        return Status.INACTIVE

    def _status_of(self, name: str) -> Status:
        """Returns the status of the pool with this name, or if there is none, of the model."""
        pool = self._pools.pool_of(name)
        if pool is None or self._pools.members(name):
            return self._pools.status(name)
        return self._pools.members(pool)[name]


class ManifestSizes:
    """Sizes of all declared and published manifests, and their sum."""

    def __init__(self) -> None:
        self._sizes: dict[Key, int] = {}
        self.total_bytes = 0

    def put(self, kind: ResourceKind, name: str, manifest: Message) -> None:
        """Adds or replaces the size of a resource."""
        self.drop(kind, name)
        self._sizes[kind, name] = size = manifest_bytes(manifest)
        self.total_bytes += size

    def drop(self, kind: ResourceKind, name: str) -> None:
        """Removes a resource. Ignores an unknown name."""
        self.total_bytes -= self._sizes.pop((kind, name), 0)

    def growth_bytes(
        self, manifests: Iterable[tuple[ResourceKind, str, Message]], leaving: "Iterable[Key]" = ()
    ) -> int:
        """Returns by how much the total would grow with these resources added or replaced, and others deleted."""
        growth = sum(manifest_bytes(each) - self._sizes.get((kind, name), 0) for kind, name, each in manifests)
        return growth - sum(self._sizes.get(key, 0) for key in leaving)
