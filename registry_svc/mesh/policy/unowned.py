"""Unowned memory: engines that a runner has loaded for a model that it no longer publishes."""

from dataclasses import dataclass, replace

UNLOAD_GRACE_SECONDS = 10.0
"""How long an unowned model stays loaded, since a forced delete unloads it itself."""
UNLOAD_RETRY_SECONDS = 60.0
"""Interval of unload requests while it is still loaded."""


@dataclass(frozen=True, slots=True)
class UnownedModel:
    """A model loaded on a runner that does not publish it."""

    runner: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnownedSince:
    """Since when a model is unowned, and whether an unload was requested. Times are monotonic seconds."""

    seen_at: float
    asked_at: float | None = None
    """When an unload was last requested; None: never."""
    can_be_unloaded: bool = True
    """False: the runner answered that it did not start the engine."""

    def asked(self, now: float) -> "UnownedSince":
        """Returns the state after an unload was requested."""
        return replace(self, asked_at=now)


def is_to_be_unloaded(since: UnownedSince, now: float) -> bool:
    """Whether to request an unload now."""
    if not since.can_be_unloaded:
        return False
    if since.asked_at is None:
        return now >= since.seen_at + UNLOAD_GRACE_SECONDS
    return now >= since.asked_at + UNLOAD_RETRY_SECONDS
