"""Which changed records a watcher is sent, and when: each once, in batches, and mere figures at their own pace."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    """Bounds of the watches of one router."""

    max_watches: int = 1_024
    """Concurrent watches of requests and of figures."""
    max_waiting_changes: int = 10_000
    """Changed requests that may wait for one watcher before it is ended with WATCH_LAGGED."""
    max_batch: int = 200
    """Requests in one message."""
    interval_seconds: float = 0.1
    """Least time between two messages of changes; the first one after silence is sent immediately."""
    figures_interval_seconds: float = 1.0
    """Least time between two messages of positions and estimates."""


class ChangeBuffer:
    """The changed records that wait for one watcher, by key. Pure: it is given the time."""

    def __init__(self, limits: WatchLimits, first: Iterable[int] = ()) -> None:
        """`first`: what there is at the beginning; it comes before every change."""
        self._limits = limits
        self._first = dict.fromkeys(first)
        self.is_synced = False
        """Whether everything that there was at the beginning has been taken."""
        self._changed: dict[int, None] = {}
        self._figures: dict[int, None] = {}
        self._next_at = self._next_figures_at = float("-inf")

    def note(self, key: int) -> bool:
        """Note a changed record; returns False when there is no room for it."""
        if key in self._changed or key in self._first:
            return True
        if self._waiting >= self._limits.max_waiting_changes:
            return False
        self._figures.pop(key, None)
        self._changed[key] = None
        return True

    def note_figures(self, key: int) -> bool:
        """Note a record of which only figures have changed; returns False when there is no room for it."""
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
        """Return when something may be taken; None: nothing waits."""
        if not self.is_synced:
            return float("-inf")
        moments = []
        if self._changed:
            moments.append(self._next_at)
        if self._figures:
            moments.append(max(self._next_at, self._next_figures_at))
        return min(moments, default=None)

    def take(self, now: float) -> list[int]:
        """Return the keys of the next batch, in the order of their first changes; empty: nothing is due."""
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
            # What is left of a full batch goes at once.
            self._next_at = now + limits.interval_seconds
        return taken


def _take(keys: dict[int, None], most: int) -> list[int]:
    taken = list(islice(keys, most))
    for key in taken:
        del keys[key]
    return taken
