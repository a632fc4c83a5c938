"""Memory without an owner: engines that a runner has loaded for a model that it does not publish any more."""

from dataclasses import dataclass, replace

UNLOAD_GRACE_SECONDS = 10.0
"""How long an unowned model stays loaded before it is unloaded: a forced delete unloads automatically."""
UNLOAD_RETRY_SECONDS = 60.0
"""How long after one request to unload it the next one follows, while it is still loaded."""


@dataclass(frozen=True, slots=True)
class UnownedModel:
    """A model that is loaded on a runner which does not publish it."""

    runner: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnownedSince:
    """Since when a model is unowned, and what was done about it. Times are monotonic seconds."""

    seen_at: float
    asked_at: float | None = None
    """When an unload was last requested; None: not yet."""
    can_be_unloaded: bool = True
    """False: its runner answered that it did not start that engine."""

    def asked(self, now: float) -> "UnownedSince":
        """Return the same after an unload was requested."""
        return replace(self, asked_at=now)


def is_to_be_unloaded(since: UnownedSince, now: float) -> bool:
    """Whether an unload is to be requested now."""
    if not since.can_be_unloaded:
        return False
    if since.asked_at is None:
        return now >= since.seen_at + UNLOAD_GRACE_SECONDS
    return now >= since.asked_at + UNLOAD_RETRY_SECONDS
