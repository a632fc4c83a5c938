"""What the mesh knows, read from memory: one by name, many by page."""

import heapq
from collections.abc import Callable, Iterable
from typing import TypeVar

from registry_svc.mesh.changes import Revised, Snapshot
from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.domain import Agent, Event, Kind, Model, Pool, Route, Runner
from registry_svc.mesh.watch import Watcher

T = TypeVar("T")


class Catalogue:
    """Answers at once; raises SHUTTING_DOWN while the registry does not run."""

    def __init__(self, core: RegistryCore) -> None:
        self._core = core

    def runner(self, name: str) -> Runner | None:
        """The runner of this name."""
        self._core.require_open()
        member = self._core.mesh.of_runner(name)
        return None if member is None else member.runner()

    def model(self, name: str) -> Model | None:
        """The model of this name."""
        self._core.require_open()
        return self._core.mesh.model(name)

    def agent(self, name: str) -> Agent | None:
        """The agent of this name."""
        self._core.require_open()
        return self._core.mesh.agent(name)

    def route(self, name: str) -> Route | None:
        """The route of this name."""
        self._core.require_open()
        return self._core.mesh.routes.get(name)

    def pool(self, name: str) -> Pool | None:
        """The pool of this name."""
        self._core.require_open()
        return self._core.mesh.pool(name)

    def pool_of(self, model: str) -> Pool | None:
        """The pool that a model is in; None when there is no such model."""
        self._core.require_open()
        name = self._core.mesh.pools.pool_of(model)
        return None if name is None else self._core.mesh.pool(name)

    def runners_after(self, name: str, limit: int) -> list[Runner]:
        """At most `limit` runners whose names come after `name`, in order."""
        self._core.require_open()
        return _page(self._core.mesh.runner_names(), self.runner, name, limit)

    def models_after(self, name: str, limit: int) -> list[Model]:
        """At most `limit` models whose names come after `name`, in order."""
        self._core.require_open()
        return _page(self._core.mesh.model_names(), self.model, name, limit)

    def agents_after(self, name: str, limit: int) -> list[Agent]:
        """At most `limit` agents whose names come after `name`, in order."""
        self._core.require_open()
        return _page(self._core.mesh.agent_names(), self.agent, name, limit)

    def routes_after(self, name: str, limit: int) -> list[Route]:
        """At most `limit` routes whose names come after `name`, in order."""
        self._core.require_open()
        return _page(self._core.mesh.routes.names(), self.route, name, limit)

    def pools_after(self, name: str, limit: int) -> list[Pool]:
        """At most `limit` pools whose names come after `name`, in order."""
        self._core.require_open()
        return _page(self._core.mesh.pools.names(), self.pool, name, limit)

    def watch(self) -> tuple[Snapshot, Watcher[Revised]]:
        """Everything there is, and a watcher that hears every change after exactly that."""
        return self._core.watch()

    def events(self, kind: Kind | None, name: str, limit: int) -> list[Event]:
        """The newest events of this kind and name, oldest first; None and "" mean all."""
        self._core.require_open()
        return self._core.events.newest(kind, name, limit)

    def watch_events(self) -> Watcher[Event]:
        """A listener that hears every event from now on."""
        self._core.require_open()
        return self._core.events.subscribe()


def _page(names: Iterable[str], find: Callable[[str], T | None], after: str, limit: int) -> list[T]:
    first = heapq.nsmallest(limit, (name for name in names if name > after))
    return [found for name in first if (found := find(name)) is not None]
