"""Whether there is what an agent points to, and what a route names."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from registry_svc.mesh.domain import AgentManifest
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is known now of that which an agent points to."""

    agent: AgentManifest
    model_known: bool
    """Whether there is a model of the target's name."""
    pool_members: Collection[str]
    """The members of the pool of the target's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What is known now of that which a route names: a model or a pool."""

    name: str
    model_known: bool
    """Whether there is a model of this name."""
    pool_members: Collection[str]
    """The members of the pool of this name."""

    def exists(self, *, arriving: Mapping[str, str], leaving: Collection[str]) -> bool:
        """Whether it is there once the models `arriving` (pool by name) have come and those `leaving` have gone."""
        if self.name in arriving or self.name in arriving.values():
            return True
        if self.model_known and self.name not in leaving:
            return True
        return any(member not in leaving and member not in arriving for member in self.pool_members)


def exists(target: Target, *, arriving: Mapping[str, str], leaving: Collection[str]) -> bool:
    """Whether the target is there once the models `arriving` (pool by name) have come and those `leaving` have gone."""
    name = target.agent.target
    if not target.agent.targets_pool:
        return name in arriving or (target.model_known and name not in leaving)
    if name in arriving.values():
        return True
    return any(member not in leaving and member not in arriving for member in target.pool_members)


def require_target(target: Target, *, arriving: Mapping[str, str], leaving: Collection[str]) -> None:
    """Raise MODEL_NOT_FOUND when an agent would point to nothing."""
    if exists(target, arriving=arriving, leaving=leaving):
        return
    kind = "pool" if target.agent.targets_pool else "model"
    raise WeftError(
        Reason.MODEL_NOT_FOUND,
        f"the agent {target.agent.name!r} points to the {kind} {target.agent.target!r}, which is neither known nor in "
        f"this call; name one that exists, or send the {kind} along",
        metadata={"agent": target.agent.name, kind: target.agent.target},
    )


def require_candidates(route: str, candidates: Sequence[Candidate], *, arriving: Mapping[str, str]) -> None:
    """Raise MODEL_NOT_FOUND when a route would name something that is not there."""
    for candidate in candidates:
        if not candidate.exists(arriving=arriving, leaving=()):
            raise WeftError(
                Reason.MODEL_NOT_FOUND,
                f"the route {route!r} names {candidate.name!r}, which is neither a model nor a pool that is known or "
                "in this call; name one that exists, or send it along",
                metadata={"route": route, "candidate": candidate.name},
            )
