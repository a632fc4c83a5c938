"""Stop strings, which may begin in one token and end in another."""

from collections.abc import Sequence


class StopFilter:
    """Lets text through up to the first stop string; holds back what could become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.has_stopped = False

    def feed(self, text: str) -> str:
        """The text that may go out now."""
        pending = self._held + text
        found = [place for place in (pending.find(stop) for stop in self._stops) if place >= 0]
        if found:
            self.has_stopped = True
            self._held = ""
            return pending[: min(found)]
        keep = self._possible_start(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def flush(self) -> str:
        """What was held back and became no stop string."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = min(len(text), max(map(len, self._stops), default=1) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
