"""The event queue of virtual time."""

import heapq
from collections.abc import Callable
from typing import TypeAlias

Action: TypeAlias = Callable[[], None]


class EventQueue:
    """A queue of actions by time; actions at the same time run in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        """Virtual seconds from the start."""
        self._queue: list[tuple[float, int, Action]] = []
        self._planned = 0

    def at(self, time: float, action: Action) -> None:
        """Schedules an action; one in the past runs now."""
        self._planned += 1
        heapq.heappush(self._queue, (max(time, self.now), self._planned, action))

    def after(self, seconds: float, action: Action) -> None:
        """Schedules an action after a delay."""
        self.at(self.now + seconds, action)

    @property
    def next_at(self) -> float | None:
        """Time of the next action; None: there is none."""
        return self._queue[0][0] if self._queue else None

    def step(self) -> None:
        """Advances to the next action and runs it. There must be one."""
        time, _, action = heapq.heappop(self._queue)
        self.now = time
        action()
