"""Requests of one session go where the last one went, whatever the policy of the pool."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from router_svc.policy.choosing.hashing import hash_bytes
from router_svc.policy.choosing.recent_places import RecentPlaces
from router_svc.policy.choosing.seats import Seat
from router_svc.policy.choosing.shelf import Shelf

if TYPE_CHECKING:
    from router_svc.policy.choice import Wish
    from router_svc.policy.choosing.pool import Pool

NAME = "session_affinity"


def of_session(pool: "Pool", shelves: Sequence[Shelf], wish: "Wish", places: RecentPlaces) -> Seat | None:
    """Where the session last ran if that is free, since nobody waits for a cache; else who owns it on the ring."""
    where = places.find(pool.name, wish.affinity_key)
    seat = None if where is None else pool.open_seat(where, shelves, wish.excluded)
    return seat or pool.owner_on_ring(hash_bytes(wish.affinity_key), shelves, wish.excluded)


def remember_session(pool: "Pool", wish: "Wish", seat: Seat, places: RecentPlaces) -> None:
    """The session runs there now."""
    places.note(pool.name, wish.affinity_key, seat.key)
