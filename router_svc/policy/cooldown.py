"""The cooldown of a client after repeated refusals."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CooldownRule:
    """When a client is refused without being counted, and for how long."""

    after_refusals: int = 10
    """Consecutive refusals for exceeded rates before a cooldown; 0: never."""
    seconds: float = 10.0
    """Length of the first cooldown; each further one is twice as long ..."""
    max_seconds: float = 300.0
    """... up to this. The length is reset after this time without a cooldown."""


@dataclass(slots=True)
class Cooldown:
    """The cooldown state of one client. Times are seconds on the router's monotonic clock."""

    refusals_in_row: int = 0
    ends_at: float = float("-inf")
    length_seconds: float = 0.0
    """0: there was none."""

    def seconds_left(self, now: float) -> float:
        """Return the remaining cooldown in seconds; 0: none."""
        return max(0.0, self.ends_at - now)

    def note_allowed(self) -> None:
        """Record an admitted request."""
        self.refusals_in_row = 0

    def note_refused(self, rule: CooldownRule, now: float) -> None:
        """Record a refusal for an exceeded rate. Do not call it during a cooldown."""
        self.refusals_in_row += 1
        if not rule.after_refusals or self.refusals_in_row < rule.after_refusals:
            return
        was_long_ago = now - self.ends_at > rule.max_seconds
        self.length_seconds = rule.seconds if was_long_ago else min(self.length_seconds * 2, rule.max_seconds)
        self.ends_at = now + self.length_seconds
        self.refusals_in_row = 0
