"""What the request log remembers of one request, while it is under way and after its end."""

from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec

from router_svc.policy.decisions import Loads, Placed, Rejects, Waits, Wakes
from weft.dispatch.placement import PlacementRequest
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority


@dataclass(frozen=True, slots=True)
class Retry:
    """An attempt failed, and the request is placed again."""

    attempt: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class LoadStart:
    """A model is loaded, and the request is among those who waited for one then."""

    wakes: Wakes
    at: float
    """When it was begun."""


Noted = Waits | Loads | Placed | Rejects | Retry | LoadStart


class RequestEntry:
    """One request under way. Times are seconds on the router's monotonic clock."""

    __slots__ = (
        "arrived_at", "arrived_wall", "client_id", "decisions", "key", "priority", "request_id", "target", "tenant",
        "word",
    )  # fmt: skip

    def __init__(self, key: int, request: PlacementRequest, now: float, wall: datetime) -> None:
        self.key = key
        self.request_id = request.request_id
        self.tenant = request.tenant
        self.client_id = request.client_id
        self.target = request.model
        self.priority = request.priority
        self.arrived_at = now - request.age_seconds
        """When it first arrived anywhere."""
        self.arrived_wall = wall - timedelta(seconds=request.age_seconds) if request.age_seconds else wall
        self.decisions: list[tuple[float, Noted]] = []
        """What was decided, each with when; words about waiting that differ only in figures are one."""
        self.word: Waits | Loads | Placed | Retry | None = None
        """Its state: the last of these."""

    def knows(self, noted: Noted) -> bool:
        """Whether this very thing was noted before."""
        return any(known is noted for _, known in self.decisions)


class EndedRequest(msgspec.Struct, gc=False, kw_only=True):
    """One request that is over.

    Thousands of them are remembered: in bytes, which take a third of what the messages do, and nothing of it is looked
    at by the garbage collector, whose pauses were most of the latency's tail (bench, "edge: a fixed rate").
    """

    key: int
    request_id: str
    tenant: str
    client_id: str
    target: str
    priority: Priority
    arrived_at: float
    arrived_wall: datetime
    ended_at: float
    reason: Reason
    message: str
    decisions: bytes
    """A RequestRecord of nothing else."""
    receipt: bytes | None = None
    """A Receipt; None: nobody has told of it."""
