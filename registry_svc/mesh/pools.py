"""Pools as they follow from the models, kept current one model at a time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from registry_svc.mesh.domain import Manifest, Status


@dataclass(slots=True)
class _Tally:
    """One pool: its members, and how many of them stand where."""

    statuses: dict[str, Status] = field(default_factory=dict)
    counts: dict[Status, int] = field(default_factory=lambda: dict.fromkeys(Status, 0))
    naming: int = 0
    """Members that name the pool."""

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


class PoolIndex:
    """All pools. A model is in the pool it names, or in the one of its own name."""

    def __init__(self) -> None:
        self._pools: dict[str, _Tally] = {}
        self._pool_of: dict[str, tuple[str, bool]] = {}

    def __len__(self) -> int:
        """How many models there are."""
        return len(self._pool_of)

    def put(self, manifest: Manifest, status: Status) -> set[str]:
        """Place a model anew; returns the pools whose own status is another one now."""
        return self._move(manifest.name, manifest, status)

    def drop(self, model: str) -> set[str]:
        """Take a model out; returns the pools whose own status is another one now."""
        return self._move(model, None, Status.INACTIVE)

    def names(self) -> Iterable[str]:
        """The names of all pools."""
        return self._pools.keys()

    def pool_of(self, model: str) -> str | None:
        """The pool a model is in; None for an unknown model."""
        place = self._pool_of.get(model)
        return None if place is None else place[0]

    def members(self, pool: str) -> Mapping[str, Status]:
        """The members of a pool by name, with their statuses; empty when there is no such pool."""
        tally = self._pools.get(pool)
        return {} if tally is None else tally.statuses

    def naming(self, pool: str) -> list[str]:
        """The members that name this pool."""
        return [model for model in self.members(pool) if self._pool_of[model][1]] if self.is_explicit(pool) else []

    def is_explicit(self, pool: str) -> bool:
        """Whether a member names the pool."""
        tally = self._pools.get(pool)
        return tally is not None and tally.naming > 0

    def status(self, pool: str) -> Status:
        """Active if one member is, else hibernating if one member is, else inactive."""
        tally = self._pools.get(pool)
        return Status.INACTIVE if tally is None else tally.status

    def _move(self, model: str, manifest: Manifest | None, status: Status) -> set[str]:
        earlier = self._pool_of.get(model)
        if manifest is not None and earlier == (manifest.pool, bool(manifest.pool_name)):
            return self._restate(model, manifest.pool, status)
        touched = {pool for pool in (earlier and earlier[0], manifest and manifest.pool) if pool}
        before = {pool: self.status(pool) for pool in touched}
        if earlier is not None:
            self._remove(model, *earlier)
        if manifest is not None:
            names_it = bool(manifest.pool_name)
            self._pool_of[model] = (manifest.pool, names_it)
            self._pools.setdefault(manifest.pool, _Tally()).add(model, status, names_it=names_it)
        return {pool for pool in touched if self.status(pool) is not before[pool]}

    def _restate(self, model: str, pool: str, status: Status) -> set[str]:
        # Thousands at once when a site goes silent: without this each would leave its pool and join it anew.
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
