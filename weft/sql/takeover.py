"""When the owner of a database counts as frozen, so that a standby ends its connection."""

from dataclasses import dataclass

PATIENCE_FACTOR = 6
"""An owner that starts, or whose statement the server works on, may be silent for this many times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerSigns:
    """What the database shows of the connection that holds the lock."""

    backend_pid: int
    """The server's process of that connection."""
    sign: tuple[str, ...]
    """Values of which one changes with every heartbeat and every statement of the owner."""
    silent_seconds: float
    """Time since the last of these, by the database's clock."""
    writes_beats: bool
    """Whether the owner writes heartbeats; one of an earlier version does not, and is never ended."""
    has_begun: bool
    """Whether the last heartbeat is of this connection; otherwise the owner starts, or has just connected again."""
    is_working: bool
    """Whether the server works on a statement of the owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenSigns:
    """The last signs of an owner, and since when a standby sees no others."""

    signs: OwnerSigns
    since: float
    """By the standby's monotonic clock."""


def after_reading(seen: SeenSigns | None, signs: OwnerSigns, now: float) -> SeenSigns:
    """Returns what a standby has seen once it has read `signs`."""
    if seen is None or seen.signs.sign != signs.sign:
        return SeenSigns(signs=signs, since=now)
    return SeenSigns(signs=signs, since=seen.since)


def is_frozen(seen: SeenSigns, now: float, silence_seconds: float) -> bool:
    """Whether an owner's connection is to be ended.

    Both clocks have to say so: one of them may have been set, or its process may have been frozen itself.
    """
    signs = seen.signs
    if not signs.writes_beats:
        return False
    is_due = signs.has_begun and not signs.is_working
    limit = silence_seconds if is_due else PATIENCE_FACTOR * silence_seconds
    return min(signs.silent_seconds, now - seen.since) > limit
