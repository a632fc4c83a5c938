"""Plans which members of a pool to load and unload, and estimates load times."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMember:
    """A member of a pool, as last reported by its runner."""

    model: str
    reachable: bool
    """Whether its runner is active."""
    loaded: bool
    """Whether it is ready or loading."""
    slots_used: int = 0
    """Number of running requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """What to do with a pool."""

    keep: tuple[str, ...]
    """Members that stay loaded."""
    load: tuple[str, ...]
    """Sleeping members to try in this order until enough are loaded; further ones replace failures."""
    missing: int
    """Number of members of `load` to load."""
    unload: tuple[str, ...]
    """Surplus loaded members, idle ones first."""


def plan_pool(members: Sequence[PoolMember], replicas: int) -> PoolPlan:
    """Plans for `replicas` loaded members. Keeps the busiest, and of equally busy ones the first by name."""
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


LAST_LOADS = 5
MAX_MODELS = 10_000


class LoadTimes:
    """The last LAST_LOADS load times of the MAX_MODELS most recently loaded models."""

    def __init__(self) -> None:
        self._seconds: OrderedDict[str, deque[float]] = OrderedDict()

    def learn(self, model: str, seconds: float) -> None:
        """Records the duration of a load."""
        self._seconds.setdefault(model, deque(maxlen=LAST_LOADS)).append(seconds)
        self._seconds.move_to_end(model)
        if len(self._seconds) > MAX_MODELS:
            self._seconds.popitem(last=False)

    def eta_seconds(self, model: str, spent_seconds: float) -> float | None:
        """Returns the remaining time of a load: the median of the last ones minus `spent_seconds`.

        None if there were none, or the load takes longer than they did.
        """
        known = self._seconds.get(model)
        if not known:
            return None
        left = median(known) - spent_seconds
        return left if left > 0 else None
