"""Usage of the router by one client: its request pattern, and its cooldown after repeated refusals."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class CooldownRule:
    """When a client is refused without being counted, and for how long."""

    after_refusals: int = 10
    """Consecutive refusals for exceeded rates before a cooldown; 0: never."""
    seconds: float = 10.0
    """The first cooldown; each further one is twice as long ..."""
    max_seconds: float = 300.0
    """... up to this. After as long without a cooldown the next one is a first one again."""


@dataclass(slots=True)
class Cooldown:
    """The cooldown state of one client. Times are seconds on the router's monotonic clock."""

    refusals_in_row: int = 0
    ends_at: float = float("-inf")
    _length: float = 0.0

    @staticmethod
    def restored(ends_at: float, seconds: float) -> "Cooldown":
        """Return the state of before a restart: when the last cooldown ended or ends, and how long it was."""
        return Cooldown(ends_at=ends_at, _length=seconds)

    @property
    def length_seconds(self) -> float:
        """Length of the last cooldown; 0: there was none."""
        return self._length

    def seconds_left(self, now: float) -> float:
        """Return the remaining cooldown in seconds; 0: none."""
        return max(0.0, self.ends_at - now)

    def note_allowed(self) -> None:
        """Record an admitted request."""
        self.refusals_in_row = 0

    def note_refused(self, rule: CooldownRule, now: float) -> None:
        """Record a refusal for an exceeded rate; refusals during a cooldown are not recorded."""
        self.refusals_in_row += 1
        if not rule.after_refusals or self.refusals_in_row < rule.after_refusals:
            return
        was_long_ago = now - self.ends_at > rule.max_seconds
        self._length = rule.seconds if was_long_ago else min(self._length * 2, rule.max_seconds)
        self.ends_at = now + self._length
        self.refusals_in_row = 0


MAX_TARGETS_COUNTED = 32
"""Targets that are counted per client; a new one replaces the least requested."""
MAX_TARGETS_TOLD = 8
INTERVAL_WEIGHT = 0.2
"""Weight of the newest interval in the usual interval: about ten requests determine it."""


MAX_COUNTED_DEVICE_SECONDS = 10.0**6
"""Most device time of one request that is counted: what runners report is not believed without a bound."""
MAX_COUNTED_MILLIJOULES = 10**11
"""Most energy of one request that is counted."""


@dataclass(slots=True)
class ClientPattern:
    """Request pattern of one client. Times are seconds on the router's monotonic clock."""

    first_seen_at: float
    last_seen_at: float
    request_count: int = 0
    refused_count: int = 0
    """Requests refused before any runner worked on them."""
    running_count: int = 0
    """Requests in progress."""
    token_count: int = 0
    """Known tokens of prompts and answers."""
    measured_count: int = 0
    """Requests whose time on accelerators was measured."""
    device_seconds: float = 0.0
    """Time on accelerators of these."""
    energy_millijoules: int | None = None
    """Energy of those whose energy was measured; None: of none."""
    usual_interval_seconds: float | None = None
    """None: fewer than two requests so far."""
    _targets: dict[str, int] = field(default_factory=dict)

    def note_arrival(self, target: str, now: float) -> None:
        """Record the arrival of a request."""
        if self.request_count:
            interval = max(0.0, now - self.last_seen_at)
            usual = interval if self.usual_interval_seconds is None else self.usual_interval_seconds
            self.usual_interval_seconds = usual + INTERVAL_WEIGHT * (interval - usual)
        self.request_count += 1
        self.running_count += 1
        self.last_seen_at = now
        self._count(target)

    def note_end(self, *, refused: bool, tokens: int) -> None:
        """Record the end of a request; `tokens`: what it used."""
        self.running_count -= 1
        self.refused_count += refused
        self.token_count += tokens

    def note_device(self, seconds: float, energy_millijoules: int | None) -> None:
        """Record the measured share of a request in the work of accelerators; None: its energy is unknown."""
        self.measured_count += 1
        self.device_seconds += min(max(0.0, seconds), MAX_COUNTED_DEVICE_SECONDS)
        if energy_millijoules is not None:
            counted = min(max(0, energy_millijoules), MAX_COUNTED_MILLIJOULES)
            self.energy_millijoules = (self.energy_millijoules or 0) + counted

    @property
    def targets(self) -> list[tuple[str, int]]:
        """The most requested targets with their counts."""
        most = sorted(self._targets.items(), key=lambda item: (-item[1], item[0]))
        return most[:MAX_TARGETS_TOLD]

    @property
    def target_counts(self) -> dict[str, int]:
        """How often each counted target was requested. Only to be read."""
        return self._targets

    def restore_targets(self, counts: Mapping[str, int]) -> None:
        """Take the counts of before a restart."""
        self._targets = dict(counts)

    def _count(self, target: str) -> None:
        count = self._targets.get(target)
        if count is None and len(self._targets) >= MAX_TARGETS_COUNTED:
            del self._targets[min(self._targets, key=lambda known: self._targets[known])]
        self._targets[target] = (count or 0) + 1
