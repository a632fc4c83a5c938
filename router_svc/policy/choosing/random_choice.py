"""Any free candidate, each as likely as the other."""

from collections.abc import Collection, Sequence

from router_svc.policy.choosing.hashing import mix
from router_svc.policy.choosing.seats import Seat
from router_svc.policy.choosing.shelf import Shelf
from router_svc.policy.grants import CandidateKey

NAME = "random"
MAX_DRAWS = 8
"""Draws that may hit excluded candidates, before the next one that is not excluded is taken."""


def draw(shelves: Sequence[Shelf], excluded: Collection[CandidateKey], seed: int) -> Seat | None:
    """One that is not excluded; the same seed draws the same from the same."""
    count = sum(len(shelf.open) for shelf in shelves)
    if not count:
        return None
    number = seed
    for _ in range(MAX_DRAWS):
        number = mix(number)
        seat = _at(shelves, number % count)
        if seat.key not in excluded:
            return seat
    begin = number % count
    following = (_at(shelves, (begin + step) % count) for step in range(min(count, len(excluded) + 1)))
    return next((seat for seat in following if seat.key not in excluded), None)


def _at(shelves: Sequence[Shelf], index: int) -> Seat:
    for shelf in shelves:
        if index < len(shelf.open):
            return shelf.open[index]
        index -= len(shelf.open)
    raise IndexError(index)
