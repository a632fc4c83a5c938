"""One after the other: the candidate that was granted longest ago."""

from router_svc.policy.choosing.seats import Rank, Seat

NAME = "round_robin"


def by_turn(seat: Seat) -> Rank:
    """Grants are numbered, so that turns go on within one moment too."""
    return (seat.granted,)
