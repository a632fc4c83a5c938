"""Who must be looked at when: deadlines and queue timeouts, in a heap with lazy deletion."""

import heapq

_SPARE_ENTRIES = 256


class Expiries:
    """One moment per waiting request, at which it runs out of time or must be looked at again."""

    def __init__(self) -> None:
        self._at: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def note(self, key: int, at: float) -> None:
        """Look at this request then, and not when it was said before."""
        self._at[key] = at
        heapq.heappush(self._heap, (at, key))
        if len(self._heap) > 2 * len(self._at) + _SPARE_ENTRIES:
            self._heap = [(moment, waiting) for waiting, moment in self._at.items()]
            heapq.heapify(self._heap)

    def forget(self, key: int) -> None:
        """It does not wait any more."""
        self._at.pop(key, None)

    def due(self, now: float) -> list[int]:
        """Whose moment has come, each once; it is noted again by who wants it looked at once more."""
        due: list[int] = []
        while self._heap and self._heap[0][0] <= now:
            at, key = heapq.heappop(self._heap)
            if self._at.get(key) == at:
                del self._at[key]
                due.append(key)
        return due
