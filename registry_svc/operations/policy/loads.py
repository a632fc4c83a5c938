"""What the load of a pool means: which of its members are loaded, and which are unloaded again."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMember:
    """A member of a pool, as its runner last reported it."""

    model: str
    reachable: bool
    """Whether its runner is there."""
    loaded: bool
    """Whether it takes requests, or is about to."""
    slots_used: int = 0
    """Requests it works on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """What is to be done with a pool."""

    keep: tuple[str, ...]
    """Loaded members that stay so."""
    load: tuple[str, ...]
    """Sleeping members in the order in which they are tried, until there are enough: further ones are for those that
    fail."""
    missing: int
    """How many of `load` have to be loaded."""
    unload: tuple[str, ...]
    """Loaded members that are too many, idle ones first."""


def plan_pool(members: Sequence[PoolMember], replicas: int) -> PoolPlan:
    """Have `replicas` members of a pool loaded. The busiest are kept, and otherwise those whose names come first."""
    there = [member for member in members if member.reachable]
    loaded = sorted((each for each in there if each.loaded), key=lambda each: (-each.slots_used, each.model))
    sleeping = sorted(each.model for each in there if not each.loaded)
    keep, surplus = loaded[:replicas], loaded[replicas:]
    return PoolPlan(
        keep=tuple(each.model for each in keep),
        load=tuple(sleeping) if len(keep) < replicas else (),
        missing=replicas - len(keep),
        unload=tuple(each.model for each in sorted(surplus, key=lambda each: (each.slots_used, each.model))),
    )
