"""The rule by which smg 1.13 places prompts, as its `--help` states it; it stands for smg in virtual time."""

from collections.abc import Sequence
from math import sqrt

from bench.sessions import Engine

MIN_MATCH = 0.3
"""Share of a prompt above which the holder of the longest prefix takes it."""
MAX_RATIO = 1.5


class SmgModel:
    """Remembers where prompts went. It has no queue, and knows no engine's speed or cache."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        """The first that got each prefix."""

    def choose(self, blocks: Sequence[bytes], engines: Sequence[Engine]) -> int:
        """Returns the engine of a prompt."""
        loads = [engine.under_way for engine in engines]
        average = sum(loads) / len(loads)
        least = loads.index(min(loads))
        matched = next((count for count in range(len(blocks), 0, -1) if blocks[count - 1] in self._holders), 0)
        found = self._holders[blocks[matched - 1]] if matched > MIN_MATCH * len(blocks) else least
        if loads[found] - average > min(64, max(4, 2 * sqrt(average))) and loads[found] > MAX_RATIO * average:
            found = least
        for block in blocks:
            self._holders.setdefault(block, found)
        return found
