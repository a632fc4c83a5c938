"""Whether there is what an agent points to."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from registry_svc.domain import AgentManifest
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
