"""How much is asked of each pool, for people who look."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from router_svc.policy.candidates import Fleet
from router_svc.policy.grants import GrantBook
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.queue import Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLength:
    """One pool at one moment."""

    pool: str
    waiting: int
    max_waiting: int
    running: int
    """Requests in flight on its models that this router granted."""


def queue_lengths(
    fleet: Fleet, waiting: Iterable[Arrival], grants: GrantBook, limits: SchedulerLimits
) -> list[QueueLength]:
    """Every pool with a member, in order of their names."""
    by_pool = Counter(fleet.pool_of(arrival.target) for arrival in waiting)
    return [
        QueueLength(
            pool=pool,
            waiting=by_pool[pool],
            max_waiting=limits.queue_depth_per_runner * len(members),
            running=sum(grants.in_flight(member) for member in members),
        )
        for pool, members in sorted(fleet.pools.items())
    ]
