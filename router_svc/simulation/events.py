"""What happens when, in virtual time."""

import heapq
from collections.abc import Callable
from typing import TypeAlias

Action: TypeAlias = Callable[[], None]


class Events:
    """A queue of actions by time; of two at one time the one that was planned first comes first."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the beginning."""
        self._queue: list[tuple[float, int, Action]] = []
        self._planned = 0

    def at(self, time: float, action: Action) -> None:
        """Plan an action; what lies in the past happens now."""
        self._planned += 1
        heapq.heappush(self._queue, (max(time, self.now), self._planned, action))

    def after(self, seconds: float, action: Action) -> None:
        """Plan an action for later."""
        self.at(self.now + seconds, action)

    @property
    def next_at(self) -> float | None:
        """When the next one is due; None: there is none."""
        return self._queue[0][0] if self._queue else None

    def step(self) -> None:
        """Go on to the next one and do it. There must be one."""
        time, _, action = heapq.heappop(self._queue)
        self.now = time
        action()
