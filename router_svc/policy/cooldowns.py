"""Who is refused again and again is refused for a while, at once and without being counted."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CooldownRule:
    """When a client has to pause, and for how long."""

    after_refusals: int = 10
    """Refusals for asking too often, with no request let through between; 0: never."""
    seconds: float = 10.0
    """The first pause; every further one is twice as long ..."""
    max_seconds: float = 300.0
    """... up to this. After as long without a pause the next one is a first one again."""


@dataclass(slots=True)
class Cooldown:
    """The pauses of one client. Times are seconds on the router's monotonic clock."""

    refusals_in_row: int = 0
    ends_at: float = float("-inf")
    _length: float = 0.0

    def seconds_left(self, now: float) -> float:
        """How long it still has to pause; 0: not at all."""
        return max(0.0, self.ends_at - now)

    def note_allowed(self) -> None:
        """A request was let through."""
        self.refusals_in_row = 0

    def note_refused(self, rule: CooldownRule, now: float) -> None:
        """It asked too often; refusals during a pause are not told here."""
        self.refusals_in_row += 1
        if not rule.after_refusals or self.refusals_in_row < rule.after_refusals:
            return
        was_long_ago = now - self.ends_at > rule.max_seconds
        self._length = rule.seconds if was_long_ago else min(self._length * 2, rule.max_seconds)
        self.ends_at = now + self._length
        self.refusals_in_row = 0
