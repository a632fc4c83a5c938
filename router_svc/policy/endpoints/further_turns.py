"""How many further turns a conversation has: the share of prompts of a pool that continue an earlier one."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

MAX_TURNS = 8.0
PRIOR_SHARE, PRIOR_PROMPTS = 0.75, 16.0
"""Assumed share of prompts with a further turn, and how many prompts it counts as."""
MAX_COUNTED_PROMPTS = 512.0
MAX_REMEMBERED_PROMPTS = 65_536
RETURN_SECONDS = 120.0
"""A prompt that none continued for this long was a last turn."""


class FurtherTurns:
    """Learns from placed prompts, by pool."""

    def __init__(self) -> None:
        self._ends: OrderedDict[tuple[str, int], float] = OrderedDict()
        """When prompts were placed that no later one has continued yet, by their last digest."""
        self._shares: dict[str, tuple[float, float]] = {}
        """Share with a further turn, and the number of prompts."""
        self._changed: set[str] = set()
        """Pools whose shares changed since `take_changed`."""

    def note(self, pool: str, digests: Sequence[int], now: float) -> None:
        """Record a prompt that is placed."""
        if not digests:
            return
        ends = self._ends
        for digest in reversed(digests):
            if (pool, digest) in ends:
                del ends[pool, digest]
                self._count(pool, 1.0)
                break
        ends[pool, digests[-1]] = now
        for _ in range(2):
            (name, digest), placed_at = next(iter(ends.items()))
            if placed_at > now - RETURN_SECONDS and len(ends) <= MAX_REMEMBERED_PROMPTS:
                break
            del ends[name, digest]
            self._count(name, 0.0)

    def expected(self, pool: str) -> float:
        """Return the expected further turns, if each turn is the last one with equal probability."""
        share, _ = self._shares.get(pool, (PRIOR_SHARE, PRIOR_PROMPTS))
        return MAX_TURNS if share >= 1.0 else min(MAX_TURNS, share / (1.0 - share))

    def _count(self, pool: str, returned: float) -> None:
        share, count = self._shares.get(pool, (PRIOR_SHARE, PRIOR_PROMPTS))
        count = min(count + 1.0, MAX_COUNTED_PROMPTS)
        self._shares[pool] = share + (returned - share) / count, count
        self._changed.add(pool)

    def take_changed(self) -> Mapping[str, tuple[float, float]]:
        """Return the shares to store that changed since the last call, with their numbers of prompts."""
        changed, self._changed = self._changed, set()
        return {pool: self._shares[pool] for pool in sorted(changed)}

    def give_back(self, pools: Iterable[str]) -> None:
        """Return these pools again from the next `take_changed`, as they could not be stored."""
        self._changed.update(pools)

    def restore(self, shares: Mapping[str, tuple[float, float]]) -> None:
        """Restore what an earlier process has learned. Call it once, before the first request."""
        self._shares.update(shares)
