"""Who may serve what, by the scenario alone and not by what a scheduler believes."""

from collections.abc import Iterable, Mapping

from router_svc.policy.arrival import ROUTE_PREFIX, Needs
from router_svc.policy.endpoints.candidates import Candidate
from router_svc.policy.endpoints.routes import Route
from router_svc.simulation.hosts import Instance


class Targets:
    """Members of every target, in the order of its ladder."""

    def __init__(self, instances: Iterable[Instance], routes: Mapping[str, Route], *, cloud_fallback: bool) -> None:
        self._by_pool: dict[str, list[Instance]] = {}
        self._pool_of: dict[str, str] = {}
        for instance in instances:
            self._by_pool.setdefault(instance.kind.name, []).append(instance)
            self._pool_of[instance.name] = instance.kind.name
        self._routes = routes
        self._cloud_fallback = cloud_fallback
        self._known: dict[str, tuple[Instance, ...]] = {}

    def members(self, target: str) -> tuple[Instance, ...]:
        """Who answers for a target, the guard of routes to the cloud applied; empty: nobody."""
        known = self._known.get(target)
        if known is None:
            known = self._known[target] = self._resolve(target)
        return known

    def _resolve(self, target: str) -> tuple[Instance, ...]:
        if not target.startswith(ROUTE_PREFIX):
            return tuple(self._named(target))
        route = self._routes.get(target.removeprefix(ROUTE_PREFIX))
        found: dict[str, Instance] = {}
        for position, name in enumerate(route.candidates if route is not None else ()):
            for instance in self._rung(name):
                if not instance.kind.remote or position == 0 or self._cloud_fallback:
                    found.setdefault(instance.name, instance)
        return tuple(found.values())

    def _rung(self, name: str) -> list[Instance]:
        """What a ladder names: a pool, or one model of it alone."""
        if name in self._by_pool:
            return self._by_pool[name]
        return [instance for instance in self._by_pool.get(self._pool_of.get(name, ""), ()) if instance.name == name]

    def _named(self, target: str) -> list[Instance]:
        """What requests name: a pool, or any model of it, which stands for the pool."""
        return self._by_pool.get(target) or self._by_pool.get(self._pool_of.get(target, ""), [])


def lacks(candidate: Candidate, needs: Needs) -> str:
    """What keeps it from ever serving such a request, in words; empty: nothing."""
    if needs.operation not in candidate.operations:
        return "it does not offer the operation"
    if candidate.remote and not needs.allow_remote:
        return "it is off the premises, and the request has no permit"
    if candidate.skills is not None and not needs.skills <= candidate.skills:
        return "it lacks a skill"
    if candidate.context_tokens and needs.context_tokens > candidate.context_tokens:
        return "its context is too short"
    return ""
