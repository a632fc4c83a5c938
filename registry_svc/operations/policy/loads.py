"""Plans the load of a pool: which members are loaded, and which are unloaded; and how long loads take."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


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
    """What to do with a pool."""

    keep: tuple[str, ...]
    """Loaded members that stay so."""
    load: tuple[str, ...]
    """Sleeping members in the order in which they are tried, until enough are loaded: further ones replace failures."""
    missing: int
    """How many of `load` have to be loaded."""
    unload: tuple[str, ...]
    """Loaded members that are too many, idle ones first."""


def plan_pool(members: Sequence[PoolMember], replicas: int) -> PoolPlan:
    """Plan for `replicas` loaded members. The busiest are kept, and otherwise those whose names come first."""
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
    """The last LAST_LOADS load times of at most MAX_MODELS models; the least recently loaded is dropped first."""

    def __init__(self) -> None:
        self._seconds: OrderedDict[str, deque[float]] = OrderedDict()

    def learn(self, model: str, seconds: float) -> None:
        """A load of `model` took so long."""
        self._seconds.setdefault(model, deque(maxlen=LAST_LOADS)).append(seconds)
        self._seconds.move_to_end(model)
        if len(self._seconds) > MAX_MODELS:
            self._seconds.popitem(last=False)

    def eta_seconds(self, model: str, spent_seconds: float) -> float | None:
        """How long a load that has taken `spent_seconds` will still take: the median of the last ones, less that.

        None: unknown, because there was none, or because it takes longer than they did.
        """
        known = self._seconds.get(model)
        if not known:
            return None
        left = median(known) - spent_seconds
        return left if left > 0 else None
