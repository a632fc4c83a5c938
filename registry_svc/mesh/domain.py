"""Plain values of the mesh on which its policies decide, free of transport and storage; enums have the wire's numbers.

Records that are only stored, sent or shown are messages of `weft.api.registry.v1`; see `records`. Times called
`..._at` are UTC; times called `..._monotonic` are seconds of this process's clock and carry every duration.
"""

from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, IntEnum

from weft.documents.resource_kinds import ResourceKind


class Phase(IntEnum):
    """Phase of an instance; numbers as in `registry.v1.InstanceState.Phase`."""

    IDLE = 1
    LOADING = 2
    READY = 3
    DRAINING = 4
    STOPPING = 5
    CRASH_LOOP = 6
    FAILED = 7
    HIBERNATING = 8


class Status(IntEnum):
    """Whether a model, an agent or a route can answer; numbers as in the `Status` of each of their messages."""

    ACTIVE = 1
    INACTIVE = 2
    HIBERNATING = 3
    """It sleeps and a request wakes it."""
    FAILED = 4
    """Of a model alone: its runner is there and cannot serve it."""


class Standing(Enum):
    """Whether a runner sends heartbeats, and if not, why. Only ACTIVE counts as alive."""

    ACTIVE = "active"
    """Heartbeats arrive."""
    SILENT = "silent"
    """None arrived for the inactive limit; the next one revives it."""
    CLOSED = "closed"
    """It closed its session; only a new OpenSession revives it."""


class EventReason(IntEnum):
    """Reason of an event; numbers as in `registry.v1.EventReason`."""

    REGISTERED = 1
    REVIVED = 2
    SILENT = 3
    CLOSED = 4
    HIBERNATED = 5
    WOKE = 6
    EXPIRED = 7
    DELETED = 8
    CREATED = 9
    CONFIGURED = 10
    WITHDRAWN = 11
    FAILED = 12
    READY = 13
    DIED = 14
    RESTARTED = 15
    UNOWNED = 16
    SWITCHED = 17


class Outcome(IntEnum):
    """Outcome of a declaration; numbers as in `registry.v1.ApplyResult.Outcome`."""

    CREATED = 1
    CONFIGURED = 2
    UNCHANGED = 3
    DELETED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A runner's hold on its rows."""

    id: str = field(repr=False)
    """Secret: its holder owns the rows."""
    request_id: str
    """Of the OpenSession that made this incarnation; a repeat of that call gets the same session."""
    runner: str
    incarnation: str
    ticket_key: bytes = field(repr=False)
    """Key of this incarnation's tickets, known to the runner and the routers only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventDraft:
    """An event of one resource, or of the mesh itself, before it is recorded."""

    kind: ResourceKind | None
    """None: the mesh itself; then `name` is the part concerned, such as "settings"."""
    name: str
    reason: EventReason
    message: str
    """Text for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinToken:
    """A token with which dial-out runners join. The secret itself is never kept."""

    id: str
    description: str
    secret_sha256: str = field(repr=False)
    """Lower-case hex."""
    created_at: datetime
    expires_at: datetime | None
    """None: never."""
