"""Least-loaded choice: the runner with the largest share of free slots."""

from collections.abc import Callable, Iterable

from router_svc.policy.candidates import Candidate


def least_loaded(
    candidates: Iterable[Candidate],
    in_flight: Callable[[Candidate], int],
    last_granted: Callable[[Candidate], float],
) -> Candidate | None:
    """The free candidate with the lowest share of slots in use; None when all are full.

    Among equals the runner's own report decides (a router that has just started knows of no grants), then who was
    granted longest ago.
    """
    free = [candidate for candidate in candidates if in_flight(candidate) < candidate.slots]
    if not free:
        return None
    return min(free, key=lambda c: (in_flight(c) / c.slots, c.slots_reported_used / c.slots, last_granted(c), c.key))
