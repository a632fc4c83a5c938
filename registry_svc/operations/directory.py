"""What operations must know of the mesh, read from the registry's own memory."""

from dataclasses import dataclass
from typing import Protocol

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.domain import Instance, Phase
from registry_svc.operations.policy.loads import PoolMember

_LOADED = frozenset({Phase.LOADING, Phase.READY})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSight:
    """A runner right now."""

    name: str
    incarnation: str
    active: bool


class Directory(Protocol):
    """Who is there."""

    def runner_of(self, model: str) -> str | None:
        """The runner that serves a model; empty: none yet. None: no model of this name is known."""
        ...

    def holder_of(self, model: str) -> str | None:
        """See `runner_of`; also the runner that has the model loaded and does not publish it any more."""
        ...

    def pool(self, name: str) -> tuple[PoolMember, ...]:
        """The members of a pool by name; empty: there is none of this name."""
        ...

    def names_pool(self, name: str) -> bool:
        """Whether models name a pool of this name, so that it is more than one model's own."""
        ...

    def runner(self, name: str) -> RunnerSight | None:
        """A runner; None: unknown."""
        ...

    def active_runners(self) -> list[str]:
        """The names of all that are there, in order."""
        ...


class MeshDirectory:
    """See Directory."""

    def __init__(self, core: RegistryCore) -> None:
        self._core = core

    def runner_of(self, model: str) -> str | None:
        """See Directory.runner_of."""
        found = self._core.mesh.model(model)
        return None if found is None else found.runner

    def holder_of(self, model: str) -> str | None:
        """See Directory.holder_of."""
        found = self.runner_of(model)
        return self._core.mesh.unowned_on(model) if found is None else found

    def pool(self, name: str) -> tuple[PoolMember, ...]:
        """See Directory.pool."""
        found = self._core.mesh.pool(name)
        if found is None:
            return ()
        return tuple(self._pool_member(model.manifest.name, model.runner) for model in found.members)

    def names_pool(self, name: str) -> bool:
        """See Directory.names_pool."""
        return self._core.mesh.pools.is_explicit(name)

    def runner(self, name: str) -> RunnerSight | None:
        """See Directory.runner."""
        member = self._core.mesh.of_runner(name)
        if member is None:
            return None
        return RunnerSight(name=name, incarnation=member.profile.incarnation, active=member.pulse.active)

    def active_runners(self) -> list[str]:
        """See Directory.active_runners."""
        return sorted(member.profile.name for member in self._core.mesh if member.pulse.active)

    def _pool_member(self, model: str, runner: str) -> PoolMember:
        member = self._core.mesh.of_runner(runner) if runner else None
        instances: tuple[Instance, ...] = () if member is None else member.capability.instances
        instance = next((each for each in instances if each.model == model), None)
        return PoolMember(
            model=model,
            reachable=member is not None and member.pulse.active,
            loaded=instance is not None and instance.phase in _LOADED,
            slots_used=0 if instance is None else instance.slots_used,
        )
