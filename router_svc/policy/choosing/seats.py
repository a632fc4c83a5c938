"""A candidate with all that changes about it from one request to the next."""

from collections import Counter
from typing import TYPE_CHECKING

from router_svc.policy.candidates import Candidate, Readiness
from router_svc.policy.grants import CandidateKey, RunnerKey
from router_svc.policy.outliers import Health, Standing

if TYPE_CHECKING:
    from router_svc.policy.choice import Considered
    from router_svc.policy.choosing.pool import Pool
    from router_svc.policy.choosing.shelf import Shelf

Rank = tuple[float, ...]
"""What free candidates of a shelf are ordered by; the lowest is chosen first."""
NEVER_GRANTED = -1
# Seats are settled twice per request, and looking up a member of an Enum takes longer than the rest of it.
_READY, _WORKS, _ON_TRIAL = Readiness.READY, Standing.WORKS, Standing.ON_TRIAL


class RunnerLoad:
    """What one incarnation of a runner works on, over all its models."""

    __slots__ = ("key", "limits", "requests", "seats")

    def __init__(self, key: RunnerKey) -> None:
        self.key = key
        self.requests = 0
        self.seats: dict[CandidateKey, Seat] = {}
        """Its candidates that are in the mesh."""
        self.limits: Counter[int] = Counter()
        """At how many requests some of its candidates take no more, and how many of them."""

    def change_limit(self, was: int, becomes: int) -> None:
        """The limit that is known of one of its candidates changed; 0: it has none, or is not there."""
        if was:
            self.limits[was] -= 1
            if not self.limits[was]:
                del self.limits[was]
        if becomes:
            self.limits[becomes] += 1


class Seat:
    """One candidate in its pool. Only its pool and the index change it."""

    __slots__ = (
        "awaited_end",
        "candidate",
        "considered",
        "entry",
        "granted",
        "health",
        "held_for",
        "in_flight",
        "is_open",
        "is_spare",
        "is_usable",
        "key",
        "place",
        "pool",
        "rank",
        "runner",
        "shelf",
        "trying",
    )

    def __init__(self, candidate: Candidate, pool: "Pool", runner: RunnerLoad, health: Health) -> None:
        self.candidate = candidate
        self.key: CandidateKey = candidate.key
        self.runner = runner
        self.health = health
        self.pool = pool
        """Where its requests count; it may no longer be a member there."""
        self.shelf: Shelf | None = None
        """None: its candidate is gone, and requests still run on it."""
        self.in_flight = 0
        self.granted = NEVER_GRANTED
        """The number of the last grant; grants are numbered over all candidates."""
        self.held_for: str | None = None
        """The model that is to be loaded in its place, empty when nobody says which; None: it is not held."""
        self.trying = False
        """Whether the one request runs that tries whether it works again. Until that is known, any request that ends
        there lets another one try: which of them tried is not kept.
        """
        self.awaited_end: float | None = None
        """When its pause or ejection ends, as far as somebody has been told to look at it then."""
        self.is_open = False
        """Whether it takes a request now."""
        self.is_spare = False
        """Whether only its ejection keeps it from taking one."""
        self.is_usable = False
        """Whether it takes requests at all: it is ready, not held, and works."""
        self.rank: Rank = ()
        self.entry = 0
        """Number of its valid entry in the heap of its shelf; 0: it has none."""
        self.considered: tuple[int, Considered] | None = None
        """What decisions say of it at a position of a ladder, as it is now; None: nobody has asked since it changed."""
        self.place = 0
        """Where it stands in the list of open ones of its shelf."""

    @property
    def is_full(self) -> bool:
        """Whether all its slots are granted."""
        return self.in_flight >= self.candidate.slots

    @property
    def runner_is_full(self) -> bool:
        """Whether its runner works on as many requests as it takes over all its models."""
        most = self.candidate.runner_max_requests
        return bool(most) and self.runner.requests >= most

    @property
    def share(self) -> float:
        """Share of its slots that are granted."""
        return self.in_flight / (self.candidate.slots or 1)

    def settle(self) -> None:
        """Work out what it is open for, after anything about it changed."""
        self.considered = None
        takes = self.candidate.readiness is _READY and self.held_for is None
        standing = self.health.standing
        self.is_usable = is_usable = takes and standing is _WORKS
        has_room = takes and not (self.is_full or self.health.paused or self.runner_is_full)
        self.is_open = is_open = has_room and (is_usable or (standing is _ON_TRIAL and not self.trying))
        self.is_spare = has_room and not is_open
