"""Routes as operators declared them, and by what they name, so that a change of a model finds those it concerns."""

from collections.abc import Iterable

from registry_svc.mesh.domain import DeclaredRoute, Route, RouteManifest, Status
from registry_svc.mesh.policy.targets import Candidate
from registry_svc.mesh.pools import PoolIndex


class RouteIndex:
    """All routes, with the status that was told of each last."""

    def __init__(self, pools: PoolIndex) -> None:
        self._pools = pools
        self._declared: dict[str, DeclaredRoute] = {}
        self._told: dict[str, Status] = {}
        self._naming: dict[str, set[str]] = {}
        """The routes that name a model or a pool, by its name."""

    def __len__(self) -> int:
        """How many routes there are."""
        return len(self._declared)

    def __contains__(self, name: object) -> bool:
        """Whether there is a route of this name."""
        return name in self._declared

    def names(self) -> Iterable[str]:
        """The names of all routes."""
        return self._declared.keys()

    def get(self, name: str) -> Route | None:
        """The route of this name."""
        declared = self._declared.get(name)
        if declared is None:
            return None
        status = self.status(declared.manifest)
        return Route(manifest=declared.manifest, status=status, created_at=declared.created_at)

    def put(self, declared: DeclaredRoute) -> None:
        """Keep a route in place of an earlier one of its name."""
        name = declared.manifest.name
        self.drop(name)
        self._declared[name] = declared
        for candidate in declared.manifest.candidates:
            self._naming.setdefault(candidate, set()).add(name)

    def drop(self, name: str) -> None:
        """Forget a route; one that is not there is passed over."""
        declared = self._declared.pop(name, None)
        self._told.pop(name, None)
        if declared is None:
            return
        for candidate in declared.manifest.candidates:
            routes = self._naming[candidate]
            routes.discard(name)
            if not routes:
                del self._naming[candidate]

    def note_told(self, route: Route) -> bool:
        """Remember what is told of a route; returns whether its status is another one than before."""
        earlier = self._told.get(route.manifest.name)
        self._told[route.manifest.name] = route.status
        return earlier is not route.status

    def naming(self, names: Iterable[str]) -> set[str]:
        """The routes that name one of these models or pools."""
        return set[str]().union(*(self._naming.get(name, ()) for name in names))

    def status(self, manifest: RouteManifest) -> Status:
        """Active if one candidate is, else hibernating if one candidate is, else inactive."""
        statuses = {self._status_of(name) for name in manifest.candidates}
        for status in (Status.ACTIVE, Status.HIBERNATING):
            if status in statuses:
                return status
        return Status.INACTIVE

    def candidates(self, manifest: RouteManifest) -> list[Candidate]:
        """What is known now of each that a route names, in its order."""
        return [
            Candidate(
                name=name,
                model_known=self._pools.pool_of(name) is not None,
                pool_members=self._pools.members(name),
            )
            for name in manifest.candidates
        ]

    def broken_by(self, leaving: set[str]) -> set[str]:
        """The routes that would name something that is no more without these models."""
        pools = {pool for model in leaving if (pool := self._pools.pool_of(model)) is not None}
        return {
            name
            for name in self.naming(leaving | pools)
            if not all(
                candidate.exists(arriving={}, leaving=leaving)
                for candidate in self.candidates(self._declared[name].manifest)
                if candidate.name in leaving or candidate.name in pools
            )
        }

    def _status_of(self, name: str) -> Status:
        """Of the pool of this name, which wins, or of the model of this name alone."""
        pool = self._pools.pool_of(name)
        if pool is None or self._pools.members(name):
            return self._pools.status(name)
        return self._pools.members(pool)[name]
