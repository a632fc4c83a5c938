"""Agents by what they point to, so that a change of a model finds those it concerns without looking at all."""

from collections.abc import Iterable

from registry_svc.mesh.domain import AgentManifest, Status
from registry_svc.mesh.pools import PoolIndex

_Target = tuple[str, bool]


class TargetIndex:
    """All agents, with the status that was told of each last."""

    def __init__(self, pools: PoolIndex) -> None:
        self._pools = pools
        self._told: dict[str, tuple[_Target, Status]] = {}
        self._agents: dict[_Target, set[str]] = {}

    def __len__(self) -> int:
        """How many agents there are."""
        return len(self._told)

    def put(self, manifest: AgentManifest, status: Status) -> bool:
        """Remember an agent; returns whether its status is another one than before."""
        told = self._told.get(manifest.name)
        self.drop(manifest.name)
        target = (manifest.target, manifest.targets_pool)
        self._told[manifest.name] = (target, status)
        self._agents.setdefault(target, set()).add(manifest.name)
        return told is None or told[1] is not status

    def drop(self, agent: str) -> None:
        """Forget an agent; one that is not there is passed over."""
        told = self._told.pop(agent, None)
        if told is None:
            return
        agents = self._agents[told[0]]
        agents.discard(agent)
        if not agents:
            del self._agents[told[0]]

    def status(self, manifest: AgentManifest) -> Status:
        """The status of the pool that an agent points to; inactive when there is none."""
        pool = manifest.target if manifest.targets_pool else self._pools.pool_of(manifest.target)
        return Status.INACTIVE if pool is None else self._pools.status(pool)

    def of_model(self, model: str) -> set[str]:
        """The agents that point to this model by name."""
        return self._agents.get((model, False), set())

    def of_pool(self, pool: str) -> set[str]:
        """The agents that point to this pool by name."""
        return self._agents.get((pool, True), set())

    def stirred(self, models: Iterable[str], pools: Iterable[str]) -> set[str]:
        """The agents that a change of these models, and of the statuses of these pools, may concern."""
        if not self._agents:
            return set()
        found = set[str]().union(*(self.of_model(model) for model in models))
        for pool in pools:
            found |= self.of_pool(pool)
            members = self._pools.members(pool)
            # Whichever is shorter: a pool may have thousands of members, and a mesh thousands of agents.
            if len(members) <= len(self._agents):
                found = found.union(*(self.of_model(model) for model in members))
            else:
                targets = (target for target, is_pool in self._agents if not is_pool and target in members)
                found = found.union(*(self.of_model(target) for target in targets))
        return found
