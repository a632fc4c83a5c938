"""Scheduling domains: which pools are scheduled together, and which router owns each domain. Pure.

Pools belong together that a route joins, or that have models on one host, whose devices they share; a model whose
engine runs on several hosts is on all of them. Each domain has one owner among the routers: the one whose name gives
the highest hash with the domain's key (rendezvous hashing). One more router therefore takes 1/N of the domains and
moves no other, and whoever has the same view computes the same owner.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from weft.dispatch.fleet import FleetView, RouterView, RunnerView
from weft.kernel.names import ROUTE_PREFIX

HASH_BYTES = 8


class Domains:
    """The domains of one view: a key for each name that a request may ask for."""

    def __init__(self, view: FleetView) -> None:
        groups = _Groups()
        for model in view.models.values():
            groups.join(model.pool, model.pool)
            runner = view.runners.get(model.runner)
            # What runs elsewhere shares no device with its neighbours.
            if runner is not None and not model.remote:
                for host in _hosts_of(runner):
                    groups.join(model.pool, _HOST + host)
        pools = {name: model.pool for name, model in view.models.items()}
        for name, route in view.routes.items():
            for candidate in route.manifest.candidates:
                groups.join(_ROUTE + name, pools.get(candidate, candidate))
        self._keys, self._pools = groups.keys(), pools

    @property
    def keys(self) -> frozenset[str]:
        """The keys of all domains: of each the first of its pools, in the order of names."""
        return frozenset(key for name, key in self._keys.items() if not name.startswith(_NO_POOL))

    def key_of(self, target: str) -> str:
        """Returns the key of the domain of a model, a pool, or `route/` and a route; an unknown name is its own."""
        pool = self._pools.get(target, target)
        if target.startswith(ROUTE_PREFIX):
            pool = _ROUTE + target.removeprefix(ROUTE_PREFIX)
        return self._keys.get(pool, target)


def owner_of(key: str, routers: Iterable[RouterView], unreachable: Collection[str] = ()) -> RouterView | None:
    """Returns the router that owns a domain: of those that neither drain nor are unreachable; None: there is none."""
    there = [router for router in routers if not router.draining and router.name not in unreachable]
    if len(there) == 1:
        return there[0]
    return max(there, key=lambda router: (_weight(key, router.name), router.name), default=None)


class DomainOwners:
    """Finds owners in the newest view, and computes the domains again only where they may have changed."""

    def __init__(self) -> None:
        self._models: object = None
        self._routes: object = None
        self._hosts: Mapping[str, tuple[str, ...]] = {}
        self._runners: object = None
        self._domains = Domains(FleetView())

    def owner(self, view: FleetView, target: str, unreachable: Collection[str] = ()) -> RouterView | None:
        """Returns the owner of what a request asks for; None: no router is there."""
        # Which domain it is does not matter to one router: a mesh of one computes nothing.
        if len(view.routers) <= 1:
            return owner_of("", view.routers.values(), unreachable)
        return owner_of(self.of(view).key_of(target), view.routers.values(), unreachable)

    def of(self, view: FleetView) -> Domains:
        """Returns the domains of a view."""
        hosts = self._hosts
        if view.runners is not self._runners:
            hosts = {name: _hosts_of(runner) for name, runner in view.runners.items()}
        if view.models is not self._models or view.routes is not self._routes or hosts != self._hosts:
            self._domains = Domains(view)
        self._models, self._routes, self._runners, self._hosts = view.models, view.routes, view.runners, hosts
        return self._domains


_NO_POOL = "~"
"""Begins the members of a set that are no pools. It sorts after all names: beside a pool none of them is smallest."""
_HOST = _NO_POOL + "host/"
_ROUTE = _NO_POOL + ROUTE_PREFIX


class _Groups:
    """Disjoint sets of names."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}

    def join(self, one: str, other: str) -> None:
        """Puts two names into the same set."""
        first, second = self._root(one), self._root(other)
        if first != second:
            self._parents[max(first, second)] = min(first, second)

    def keys(self) -> Mapping[str, str]:
        """Returns the smallest member of each member's set."""
        return MappingProxyType({name: self._root(name) for name in self._parents})

    def _root(self, name: str) -> str:
        parents = self._parents
        parents.setdefault(name, name)
        while parents[name] != name:
            parents[name] = parents[parents[name]]
            name = parents[name]
        return name


def _hosts_of(runner: RunnerView) -> tuple[str, ...]:
    return tuple(host for host in (runner.host, *runner.worker_hosts) if host)


def _weight(key: str, router: str) -> int:
    digest = hashlib.blake2b(f"{key}\0{router}".encode(), digest_size=HASH_BYTES).digest()
    return int.from_bytes(digest, "big")
