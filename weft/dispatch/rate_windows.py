"""Sliding windows: how much each key used in the last second, minute or hour. One implementation for every API.

A moving window, counted on a `Clock` in at most BUCKETS_PER_WINDOW steps; amounts can be corrected afterwards. A leaky
bucket (GCRA) would be smaller, but lets up to twice the rate through one window, and cannot take back one amount.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.units import Rate

BUCKETS_PER_WINDOW = 256
"""Amounts within a 256th of a window expire together, at the time of the newest: never too early."""
EVERYBODY_ELSE = "+everybody-else"
"""The key shared by all keys beyond a bound. It cannot collide: names of tenants and clients begin with a letter or a
digit.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """An amount to be counted."""

    key: str
    """Key of the window; keys of different kinds must differ by themselves."""
    who: str
    """The same for people, such as "Tenant community-x"."""
    rate: Rate
    amount: int = 1


class RateWindows:
    """Counts in this process. Called from one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._windows: dict[tuple[str, Rate], _Window] = {}

    def take(self, claims: Sequence[Claim]) -> float:
        """Counts all of them, or none; returns the time on the monotonic clock, for a correction.

        A claim above its whole rate is let through when its window is empty. Raises RATE_LIMIT_EXCEEDED with limit,
        remaining and resetAt (unix time in seconds), naming the first that is too much.
        """
        now = self._clock.monotonic()
        for claim in claims:
            if self._settled(claim, now).total + _within(claim) > claim.rate.amount:
                raise self._refusal(claim, now)
        for claim in claims:
            self._windows[claim.key, claim.rate].add(now, claim.rate.window_seconds, claim.amount)
        return now

    def correct(self, key: str, rate: Rate, amount: int, *, counted_at: float) -> None:
        """Adds an amount, which may be negative, regardless of the limit.

        What is taken back is that of `counted_at`: where it has left the window already, there is nothing to take.
        """
        now, window = self._clock.monotonic(), self._windows.get((key, rate))
        if window is None:
            return
        window.settle(now, rate.window_seconds)
        if amount > 0:
            window.add(now, rate.window_seconds, amount)
        else:
            window.take_back(-amount, counted_at)

    def counted(self, key: str, rate: Rate) -> int:
        """Returns the current amount in its window."""
        window = self._windows.get((key, rate))
        if window is None:
            return 0
        window.settle(self._clock.monotonic(), rate.window_seconds)
        return window.total

    def forget(self, key: str, rate: Rate) -> None:
        """Resets the windows."""
        self._windows.pop((key, rate), None)

    def _settled(self, claim: Claim, now: float) -> "_Window":
        """The window of a claim without what has expired."""
        window = self._windows.setdefault((claim.key, claim.rate), _Window())
        window.settle(now, claim.rate.window_seconds)
        return window

    def _refusal(self, claim: Claim, now: float) -> WeftError:
        """The refusal of a claim that does not fit into its window."""
        rate, window = claim.rate, self._windows[claim.key, claim.rate]
        oldest = window.buckets[0].newest if window.buckets else now
        wait = window.seconds_until_free(now, rate, _within(claim))
        reset_unix = self._clock.utc_now().timestamp() + max(0.0, oldest + rate.window_seconds - now)
        return WeftError(
            Reason.RATE_LIMIT_EXCEEDED,
            f"{claim.who} exceeded {rate}",
            metadata={
                "limit": str(rate.amount),
                "remaining": str(max(0, rate.amount - window.total)),
                "resetAt": str(int(reset_unix) + 1),
            },
            retry_after_seconds=wait,
        )


class TrackedKeys:
    """Keys without a configured limit: a bounded number is counted separately, all others share one window."""

    def __init__(self, windows: RateWindows, rates: Sequence[Rate], max_keys: int, prefix: str, clock: Clock) -> None:
        """`rates` are those of every such key; `prefix` sets them apart from other kinds of keys."""
        self._windows = windows
        self._rates = tuple(rates)
        self._max_keys = max_keys
        self._prefix = prefix
        self._clock = clock
        self._longest_window = max((rate.window_seconds for rate in rates), default=0)
        self._last_seen: OrderedDict[str, float] = OrderedDict()
        """Oldest first, on the monotonic clock."""

    def __len__(self) -> int:
        return len(self._last_seen)

    def key_of(self, name: str) -> str:
        """The key under which a name is counted."""
        seen, now = self._last_seen, self._clock.monotonic()
        if name not in seen and len(seen) >= self._max_keys:
            self._forget_idle(now)
            if len(seen) >= self._max_keys:
                return self._prefix + EVERYBODY_ELSE
        seen[name] = now
        seen.move_to_end(name)
        return self._prefix + name

    def forget_all(self) -> None:
        """Removes all keys with their windows."""
        for key in (*(self._prefix + name for name in self._last_seen), self._prefix + EVERYBODY_ELSE):
            for rate in self._rates:
                self._windows.forget(key, rate)
        self._last_seen.clear()

    def _forget_idle(self, now: float) -> None:
        """Removes keys with empty windows."""
        # A bucket leaves its window with its newest entry.
        longest = self._longest_window * (1 + 1 / BUCKETS_PER_WINDOW)
        while self._last_seen:
            name, last = next(iter(self._last_seen.items()))
            if now - last <= longest:
                return
            key = self._prefix + name
            if any(self._windows.counted(key, rate) for rate in self._rates):
                # An answer is counted when it ends, which may be long after its request came.
                self._last_seen[name] = now
                self._last_seen.move_to_end(name)
                continue
            del self._last_seen[name]
            for rate in self._rates:
                self._windows.forget(key, rate)


@dataclass(slots=True)
class _Bucket:
    began: float
    newest: float
    amount: int


class _Window:
    __slots__ = ("buckets", "total")

    def __init__(self) -> None:
        self.buckets: deque[_Bucket] = deque()
        self.total = 0

    def settle(self, now: float, length: float) -> None:
        """Removes expired amounts."""
        while self.buckets and self.buckets[0].newest <= now - length:
            self.total -= self.buckets.popleft().amount

    def add(self, now: float, length: float, amount: int) -> None:
        self.total += amount
        if self.buckets and now - self.buckets[-1].began < length / BUCKETS_PER_WINDOW:
            self.buckets[-1].newest = now
            self.buckets[-1].amount += amount
        else:
            self.buckets.append(_Bucket(now, now, amount))

    def take_back(self, amount: int, counted_at: float) -> None:
        """Subtracts an amount that was counted then; never below zero."""
        for place in reversed(range(len(self.buckets))):
            bucket = self.buckets[place]
            if bucket.began <= counted_at:
                taken = min(amount, bucket.amount)
                bucket.amount -= taken
                self.total -= taken
                if not bucket.amount:
                    del self.buckets[place]
                return

    def seconds_until_free(self, now: float, rate: Rate, amount: int) -> float:
        """Seconds until the amount fits, without further use."""
        over = self.total + amount - rate.amount
        freed_at = now - rate.window_seconds
        for bucket in self.buckets:
            if over <= 0:
                break
            over -= bucket.amount
            freed_at = bucket.newest
        return max(0.0, freed_at + rate.window_seconds - now)


def _within(claim: Claim) -> int:
    """A request that is larger than a whole window waits for an empty one."""
    return min(claim.amount, claim.rate.amount)
