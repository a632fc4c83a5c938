"""Plain values for the policies of the mesh; enums have the wire's numbers.

Records that are only stored, sent or shown are messages of `weft.api.registry.v1`; see `records`. Times called
`..._at` are UTC; times called `..._monotonic` are seconds of this process's clock, used for all durations.
"""

from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, IntEnum


class Status(IntEnum):
    """Whether a model, agent or route can answer; numbers as in the `Status` of their messages."""

    ACTIVE = 1
    INACTIVE = 2
    HIBERNATING = 3
    """A request wakes it."""
    FAILED = 4
    """Only for models: the runner is active, but cannot serve it."""


class Standing(Enum):
    """Whether a runner sends heartbeats, and if not, why. Only ACTIVE means alive."""

    ACTIVE = "active"
    SILENT = "silent"
    """No heartbeat for the inactive limit; the next one reconnects it."""
    CLOSED = "closed"
    """It closed its session; only a new OpenSession reconnects it."""


class Outcome(IntEnum):
    """Outcome of a declaration; numbers as in `registry.v1.ApplyResult.Outcome`."""

    CREATED = 1
    CONFIGURED = 2
    UNCHANGED = 3
    DELETED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A runner's ownership of its resources."""

    id: str = field(repr=False)
    """Secret: its bearer owns the resources."""
    request_id: str
    """Request id of the OpenSession of this incarnation; repeating that call returns the same session."""
    runner: str
    incarnation: str
    ticket_key: bytes = field(repr=False)
    """Key of this incarnation's tickets, known only to the runner and the routers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinToken:
    """A join token of dial-out runners, or a machine that joined with one, without its secret."""

    id: str
    description: str
    secret_sha256: str = field(repr=False)
    """Lower-case hex."""
    created_at: datetime
    expires_at: datetime | None
    """None: never."""
    name_pattern: str = ""
    pool: str = ""
    reusable: bool = True
    machine: bool = False
    names: str = ""
    """Names that its runners have published, separated by spaces; they stay reserved."""
