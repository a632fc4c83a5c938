"""Counts refusals or cancellations in windows, so that a flood of them does not fill the audit log."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta

WINDOW_SECONDS = 600.0
MAX_ENTRIES_PER_WINDOW = 20
MAX_COUNTED_REASONS = 16
OTHER_REASONS = "other"
# Share of the log that refusals may fill; the rest is for accepted operations.
SHARE_FOR_REFUSALS = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedRefusals:
    """Refusals without separate entries."""

    since: datetime
    until: datetime
    count: int
    reasons: dict[str, int] = field(hash=False)
    """Counts by reason; at most MAX_COUNTED_REASONS, the rest as OTHER_REASONS."""


class RefusalWindow:
    """Counts refusals in windows of WINDOW_SECONDS.

    The first MAX_ENTRIES_PER_WINDOW of a window each get a separate entry; the others share one, written at the end of
    the window. A flood writes at most 21 entries in 10 minutes, 3,024 a day.
    """

    def __init__(self) -> None:
        self._since: datetime | None = None
        self._written = 0
        self._counted: Counter[str] = Counter()

    def takes(self, now: datetime) -> bool:
        """Whether a refusal at `now` gets a separate entry. Call `closed` first."""
        if self._since is None:
            self._since = now
        if self._written < MAX_ENTRIES_PER_WINDOW:
            self._written += 1
            return True
        return False

    def count(self, why: str) -> None:
        """Counts a refusal without a separate entry."""
        known = why in self._counted or len(self._counted) < MAX_COUNTED_REASONS
        self._counted[why if known else OTHER_REASONS] += 1

    def closed(self, now: datetime, *, at_once: bool = False) -> CountedRefusals | None:
        """Returns the counts of an expired window, or of any window with `at_once`, and ends it. None: no counts."""
        # A clock that was set back also ends the window, which otherwise might never end.
        over = self._since is not None and not timedelta(0) <= now - self._since < timedelta(seconds=WINDOW_SECONDS)
        if self._since is None or not (over or at_once):
            return None
        counted, since = self._counted, self._since
        self._since, self._written, self._counted = None, 0, Counter()
        if not counted:
            return None
        return CountedRefusals(since=since, until=now, count=counted.total(), reasons=dict(sorted(counted.items())))
