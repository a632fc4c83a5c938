"""Which changed records a watcher receives, and when: in batches, and changed figures at a separate rate."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    """Bounds of the watches of one router."""

    max_watches: int = 1_024
    """Concurrent watches of requests and figures."""
    max_waiting_changes: int = 10_000
    """Maximum changed requests queued for one watcher; above it the watch ends with WATCH_LAGGED."""
    max_batch: int = 200
    interval_seconds: float = 0.1
    """Minimum time between messages of changes; the first one after silence is sent immediately."""
    figures_interval_seconds: float = 1.0
    """Minimum time between messages of positions and estimates."""


class ChangeBuffer:
    """The changed records queued for one watcher, by key. Pure: callers pass the time."""

    def __init__(self, limits: WatchLimits, first: Iterable[int] = ()) -> None:
        """`first`: keys that exist when the watch begins; they are sent before any change."""
        self._limits = limits
        self._first = dict.fromkeys(first)
        self.is_synced = False
        """Whether all of `first` has been taken."""
        self._changed: dict[int, None] = {}
        self._figures: dict[int, None] = {}
        self._next_at = self._next_figures_at = float("-inf")

    def note(self, key: int) -> bool:
        """Note a changed record; returns False if the buffer is full."""
        if key in self._changed or key in self._first:
            return True
        if self._waiting >= self._limits.max_waiting_changes:
            return False
        self._figures.pop(key, None)
        self._changed[key] = None
        return True

    def note_figures(self, key: int) -> bool:
        """Note a record of which only figures changed; returns False if the buffer is full."""
        if key in self._figures or key in self._changed or key in self._first:
            return True
        if self._waiting >= self._limits.max_waiting_changes:
            return False
        self._figures[key] = None
        return True

    @property
    def _waiting(self) -> int:
        return len(self._changed) + len(self._figures)

    def due_at(self) -> float | None:
        """Return when the next batch is due; None: the buffer is empty."""
        if not self.is_synced:
            return float("-inf")
        moments = []
        if self._changed:
            moments.append(self._next_at)
        if self._figures:
            moments.append(max(self._next_at, self._next_figures_at))
        return min(moments, default=None)

    def take(self, now: float) -> list[int]:
        """Return the keys of the next batch in order of their first changes; empty: none is due."""
        limits = self._limits
        if not self.is_synced:
            taken = _take(self._first, limits.max_batch)
            self.is_synced = not self._first
            return taken
        due = self.due_at()
        if due is None or due > now:
            return []
        taken = _take(self._changed, limits.max_batch)
        if self._figures and now >= self._next_figures_at:
            taken += _take(self._figures, limits.max_batch - len(taken))
            if not self._figures:
                self._next_figures_at = now + limits.figures_interval_seconds
        if not self._changed:
            # The rest of a full batch is due immediately.
            self._next_at = now + limits.interval_seconds
        return taken


def _take(keys: dict[int, None], most: int) -> list[int]:
    taken = list(islice(keys, most))
    for key in taken:
        del keys[key]
    return taken
