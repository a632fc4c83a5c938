"""Who probably has the beginning of the prompt in its cache, unless it has more than its share of the load."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from router_svc.policy.choosing.recent_places import RecentPlaces
from router_svc.policy.choosing.seats import Seat
from router_svc.policy.choosing.shelf import Shelf

if TYPE_CHECKING:
    from router_svc.policy.choice import Wish
    from router_svc.policy.choosing.pool import Pool

NAME = "prefix_affinity"
MAX_DIGESTS = 32
"""Beginnings of one prompt that are looked at, the shortest ones first: the others are only longer."""


def with_prefix(pool: "Pool", shelves: Sequence[Shelf], wish: "Wish", places: RecentPlaces) -> Seat | None:
    """Where the longest beginning that is remembered last ran; else who owns the shortest one on the pool's ring.

    The shortest one, since it is what prompts share that have something in common, and every router finds the same.
    """
    digests = wish.prefix_digests[:MAX_DIGESTS]
    for digest in reversed(digests):
        where = places.find(pool.name, digest)
        seat = None if where is None else pool.open_seat(where, shelves, wish.excluded)
        if seat is not None and pool.bears_more(seat):
            return seat
    return pool.owner_on_ring(digests[0], shelves, wish.excluded) if digests else None


def remember_prefix(pool: "Pool", wish: "Wish", seat: Seat, places: RecentPlaces) -> None:
    """The prompt goes there, and its beginnings will be in its cache."""
    for digest in wish.prefix_digests[:MAX_DIGESTS]:
        places.note(pool.name, digest, seat.key)
