"""How a client asks: how often, for what, and how much it takes."""

from dataclasses import dataclass, field


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


MAX_TARGETS_COUNTED = 32
"""Targets of one client that are counted one by one; a new one takes the place of the least asked for."""
MAX_TARGETS_TOLD = 8
INTERVAL_WEIGHT = 0.2
"""Of the newest interval in the usual one: some ten requests decide it."""


@dataclass(slots=True)
class ClientPattern:
    """What is known of one client. Times are seconds on the router's monotonic clock."""

    first_seen_at: float
    last_seen_at: float
    request_count: int = 0
    refused_count: int = 0
    """Of these, refused before any runner worked on them."""
    running_count: int = 0
    """Of these, under way."""
    token_count: int = 0
    """Of prompts and answers, as far as they are known."""
    usual_interval_seconds: float | None = None
    """None: there were not two requests yet."""
    _targets: dict[str, int] = field(default_factory=dict)

    def note_arrival(self, target: str, now: float) -> None:
        """It asks for something."""
        if self.request_count:
            interval = max(0.0, now - self.last_seen_at)
            usual = interval if self.usual_interval_seconds is None else self.usual_interval_seconds
            self.usual_interval_seconds = usual + INTERVAL_WEIGHT * (interval - usual)
        self.request_count += 1
        self.running_count += 1
        self.last_seen_at = now
        self._count(target)

    def note_end(self, *, refused: bool, tokens: int) -> None:
        """One of its requests is over; `tokens` is what it took."""
        self.running_count -= 1
        self.refused_count += refused
        self.token_count += tokens

    @property
    def targets(self) -> list[tuple[str, int]]:
        """What it asks for most, and how often."""
        most = sorted(self._targets.items(), key=lambda item: (-item[1], item[0]))
        return most[:MAX_TARGETS_TOLD]

    def _count(self, target: str) -> None:
        count = self._targets.get(target)
        if count is None and len(self._targets) >= MAX_TARGETS_COUNTED:
            del self._targets[min(self._targets, key=lambda known: self._targets[known])]
        self._targets[target] = (count or 0) + 1
