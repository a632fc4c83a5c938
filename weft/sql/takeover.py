"""Decides when the owner of a database is frozen, so that a standby ends its connection."""

from dataclasses import dataclass

PATIENCE_FACTOR = 6
"""Factor of the silence limit for an owner that is starting, or waiting for the server to run its statement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerSigns:
    """The database's view of the connection that holds the lock."""

    backend_pid: int
    """The server process of the connection."""
    sign: tuple[str, ...]
    """Values that change with every heartbeat and every statement of the owner."""
    silent_seconds: float
    """Time since the last change, by the database's clock."""
    writes_beats: bool
    """Whether the owner writes heartbeats. One of an earlier version does not, and is never ended."""
    has_begun: bool
    """Whether this connection has written a heartbeat; otherwise the owner is starting, or has just reconnected."""
    is_working: bool
    """Whether the server is running a statement of the owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenSigns:
    """The last signs of an owner, and since when they are unchanged."""

    signs: OwnerSigns
    since: float
    """On the standby's monotonic clock."""


def after_reading(seen: SeenSigns | None, signs: OwnerSigns, now: float) -> SeenSigns:
    """Returns the seen signs after a new reading."""
    if seen is None or seen.signs.sign != signs.sign:
        return SeenSigns(signs=signs, since=now)
    return SeenSigns(signs=signs, since=seen.since)


def is_frozen(seen: SeenSigns, now: float, silence_seconds: float) -> bool:
    """Whether to end an owner's connection.

    Both clocks must exceed the limit, since one may have been set, or its process may have been frozen.
    """
    signs = seen.signs
    if not signs.writes_beats:
        return False
    is_due = signs.has_begun and not signs.is_working
    limit = silence_seconds if is_due else PATIENCE_FACTOR * silence_seconds
    return min(signs.silent_seconds, now - seen.since) > limit
