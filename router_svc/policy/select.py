"""Least-loaded choice: the runner with the largest share of free slots."""

from collections.abc import Callable, Iterable

from router_svc.policy.candidates import Candidate


def least_loaded(
    candidates: Iterable[Candidate],
    in_flight: Callable[[Candidate], int],
    last_granted: Callable[[Candidate], float],
) -> Candidate | None:
    """The free candidate with the lowest share of slots in use; among equals the one idle longest. None: all full."""
    free = [candidate for candidate in candidates if in_flight(candidate) < candidate.slots]
    if not free:
        return None
    return min(free, key=lambda c: (in_flight(c) / c.slots, last_granted(c), c.key))
