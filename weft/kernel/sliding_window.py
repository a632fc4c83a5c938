"""A sliding window: the amount used in the last seconds. Pure: methods take the time.

Amounts are counted in at most BUCKETS_PER_WINDOW buckets, which expire as a whole, and can be corrected afterwards. A
leaky bucket (GCRA) would be smaller, but allows up to twice the rate in one window, and cannot take back an amount.
"""

from collections import deque
from dataclasses import dataclass

BUCKETS_PER_WINDOW = 256
"""Amounts within a 256th of a window expire with the newest of them, so never too early."""


@dataclass(slots=True)
class _Bucket:
    began: float
    newest: float
    amount: int


class SlidingWindow:
    """The amounts of the last `length` seconds. Times are seconds on one monotonic clock."""

    __slots__ = ("_buckets", "length", "total")

    def __init__(self, length: float) -> None:
        self.length = length
        self._buckets: deque[_Bucket] = deque()
        self.total = 0
        """The amount in the window, as of the last `settle`."""

    def settle(self, now: float) -> int:
        """Removes expired amounts. Returns the amount in the window."""
        while self._buckets and self._buckets[0].newest <= now - self.length:
            self.total -= self._buckets.popleft().amount
        return self.total

    def has_room(self, now: float, most: int, amount: int) -> bool:
        """Whether an amount fits into the window."""
        return self.settle(now) + amount <= most

    def left(self, now: float, most: int) -> int:
        """Returns how much still fits into the window, at least 0."""
        return max(0, most - self.settle(now))

    def add(self, now: float, amount: int) -> None:
        """Counts an amount."""
        self.total += amount
        if self._buckets and now - self._buckets[-1].began < self.length / BUCKETS_PER_WINDOW:
            self._buckets[-1].newest = now
            self._buckets[-1].amount += amount
        else:
            self.settle(now)
            self._buckets.append(_Bucket(now, now, amount))

    def take_back(self, amount: int, counted_at: float) -> None:
        """Subtracts an amount that was counted at a time. Ignores what has expired, and never goes below zero."""
        for place in reversed(range(len(self._buckets))):
            bucket = self._buckets[place]
            if bucket.began <= counted_at:
                taken = min(amount, bucket.amount)
                bucket.amount -= taken
                self.total -= taken
                if not bucket.amount:
                    del self._buckets[place]
                return

    def seconds_until_room(self, now: float, most: int, amount: int) -> float:
        """Returns the seconds until `amount` fits, if nothing else is counted."""
        over = self.total + amount - most
        freed_at = now - self.length
        for bucket in self._buckets:
            if over <= 0:
                break
            over -= bucket.amount
            freed_at = bucket.newest
        return max(0.0, freed_at + self.length - now)

    def seconds_until_less(self, now: float) -> float:
        """Returns the seconds until the oldest amount expires; `length` if the window is empty."""
        oldest = self._buckets[0].newest if self._buckets else now
        return max(0.0, oldest + self.length - now)

    def seconds_until_empty(self, now: float) -> float:
        """Returns the seconds until the window is empty, if nothing else is counted."""
        return max(0.0, self._buckets[-1].newest + self.length - now) if self._buckets else 0.0
