"""The candidate with the lowest share of its slots in use."""

from collections.abc import Collection, Sequence
from operator import attrgetter

from router_svc.policy.choosing.seats import Rank, Seat
from router_svc.policy.choosing.shelf import Shelf
from router_svc.policy.grants import CandidateKey

NAME = "least_loaded"
_place = attrgetter("rank", "key")


def by_load(seat: Seat) -> Rank:
    """The share of slots granted; among equals what its runner reports, and then who was granted longest ago.

    A router that has just started knows of no grants.
    """
    candidate = seat.candidate
    slots = candidate.slots or 1
    return (seat.in_flight / slots, candidate.slots_reported_used / slots, seat.granted)


def first_of(shelves: Sequence[Shelf], excluded: Collection[CandidateKey]) -> Seat | None:
    """The seat of the lowest rank over several shelves of one pool."""
    if len(shelves) == 1:
        return shelves[0].first(excluded)
    firsts = [seat for shelf in shelves if (seat := shelf.first(excluded)) is not None]
    return min(firsts, key=_place, default=None)
