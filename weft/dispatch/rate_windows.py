"""Sliding-window rate limits for many keys, on a `Clock`.

A window is identified by key, unit and length, not by its limit, so its count survives a change of the limit.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType

from weft.api.common.v1.rate_limit_pb2 import RateLimitStatus, RateLimitWindow
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import duration_of
from weft.kernel.values.units import DAY, HOUR, MINUTE, MONTH, SECOND, WEEK, Rate, RateUnit

BUCKETS_PER_WINDOW = 256
"""Amounts within a 256th of a window expire with the newest of them, so never too early."""


@dataclass(slots=True)
class _Bucket:
    began: float
    newest: float
    amount: int


class SlidingWindow:
    """The amounts of the last `length` seconds. Times are seconds on one monotonic clock.

    Amounts are counted in at most BUCKETS_PER_WINDOW buckets, which expire as a whole, and can be corrected afterwards.
    A leaky bucket (GCRA) would be smaller, but allows up to twice the rate in one window, and takes back no amount.
    """

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
        for index in reversed(range(len(self._buckets))):
            bucket = self._buckets[index]
            if bucket.began <= counted_at:
                taken = min(amount, bucket.amount)
                bucket.amount -= taken
                self.total -= taken
                if not bucket.amount:
                    del self._buckets[index]
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


ALL_OTHERS = "+everybody-else"
"""The key shared by all keys beyond a limit. It cannot collide: other names begin with a letter or a digit."""
MIN_TIDIED_KEYS = 1_024
"""Number of keys from which those with empty windows are forgotten, when it has doubled."""
MAX_LOOKED_AT = 64
"""Names that the arrival of a further one looks at, the least recently used first."""
_WINDOW_WORDS: Mapping[int, str] = MappingProxyType(
    {SECOND: "second", MINUTE: "minute", HOUR: "hour", DAY: "day", WEEK: "week", MONTH: "month"}
)
_UNIT_WORDS: Mapping[RateUnit, str] = MappingProxyType({RateUnit.REQUESTS: "requests", RateUnit.TOKENS: "tokens"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """An amount to count."""

    key: str
    """Window key; keys of different kinds must differ."""
    who: str
    """The key for people, such as "Tenant community-x"."""
    rate: Rate
    amount: int = 1
    spare: int = 0
    """Amount that must remain in the window for others."""
    about: Mapping[str, str] = field(default_factory=dict)
    """Additional metadata of a refusal."""


class RateWindows:
    """Counts in this process. Empty windows are forgotten. Not thread-safe: called from one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._windows: dict[str, dict[tuple[RateUnit, int], SlidingWindow]] = {}
        """By key, unit and length."""
        self._tidy_at = MIN_TIDIED_KEYS

    def take(self, amounts: Sequence[Amount]) -> float:
        """Counts all amounts or none; returns the monotonic time, for later corrections.

        An amount above the whole limit is accepted when its window is empty. Raises RATE_LIMIT_EXCEEDED for the amount
        with the longest wait, see `_refusal`.
        """
        now = self._clock.monotonic()
        if len(self._windows) >= self._tidy_at:
            self._windows = {key: kept for key, kept in self._windows.items() if not self.is_empty(key)}
            self._tidy_at = max(MIN_TIDIED_KEYS, 2 * len(self._windows))
        windows = [self.window(wanted.key, wanted.rate) for wanted in amounts]
        refused = [
            (window.seconds_until_room(now, wanted.rate.amount, _with_spare(wanted)), index)
            for index, (wanted, window) in enumerate(zip(amounts, windows, strict=True))
            if not window.has_room(now, wanted.rate.amount, within(wanted))
            or (wanted.spare and window.left(now, wanted.rate.amount) < _with_spare(wanted))
        ]
        if refused:
            wait, index = max(refused, key=lambda each: (each[0], -each[1]))
            raise self._refusal(amounts, amounts[index], wait, now)
        for wanted, window in zip(amounts, windows, strict=True):
            window.add(now, wanted.amount)
        return now

    def correct(self, key: str, rate: Rate, amount: int, *, counted_at: float) -> None:
        """Adds an amount, which may be negative, regardless of the limit.

        A negative amount is taken from the time `counted_at`; if that has left the window, nothing changes.
        """
        now, window = self._clock.monotonic(), self._known(key, rate)
        if window is None:
            return
        window.settle(now)
        if amount > 0:
            window.add(now, amount)
        else:
            window.take_back(-amount, counted_at)

    def counted(self, key: str, rate: Rate) -> int:
        """Returns the current count of a window."""
        window = self._known(key, rate)
        return 0 if window is None else window.settle(self._clock.monotonic())

    def reset_seconds(self, key: str, rate: Rate) -> float:
        """Returns the time until a window is empty if nothing else is counted."""
        window = self._known(key, rate)
        return 0.0 if window is None else window.seconds_until_empty(self._clock.monotonic())

    def status(self, amounts: Sequence[Amount]) -> RateLimitStatus:
        """Returns what is left for such amounts, by the tightest window of each unit."""
        return RateLimitStatus(
            requests=self._tightest(amounts, RateUnit.REQUESTS), tokens=self._tightest(amounts, RateUnit.TOKENS)
        )

    def forget(self, key: str) -> None:
        """Resets all windows of a key."""
        self._windows.pop(key, None)

    def is_empty(self, key: str) -> bool:
        """Whether nothing is counted in any window of a key."""
        now = self._clock.monotonic()
        return not any(window.settle(now) for window in self._windows.get(key, {}).values())

    def window(self, key: str, rate: Rate) -> SlidingWindow:
        """Returns the window of a key and a rate, created empty if needed."""
        found = self._known(key, rate)
        if found is None:
            found = SlidingWindow(rate.window_seconds)
            self._windows.setdefault(key, {})[rate.unit, rate.window_seconds] = found
        return found

    def _known(self, key: str, rate: Rate) -> SlidingWindow | None:
        windows = self._windows.get(key)
        return None if windows is None else windows.get((rate.unit, rate.window_seconds))

    def _tightest(self, amounts: Sequence[Amount], unit: RateUnit) -> RateLimitWindow | None:
        """Returns the window with the least left; if equal, the one that resets last."""
        now, least = self._clock.monotonic(), -1
        tightest: list[tuple[Rate, SlidingWindow]] = []
        for wanted in amounts:
            rate = wanted.rate
            if rate.unit is not unit:
                continue
            window = self.window(wanted.key, rate)
            left = window.left(now, rate.amount)
            if not tightest or left < least:
                least, tightest = left, [(rate, window)]
            elif left == least:
                tightest.append((rate, window))
        if not tightest:
            return None
        rate, window = max(tightest, key=lambda each: each[1].seconds_until_empty(now)) if tightest[1:] else tightest[0]
        return RateLimitWindow(
            limit=rate.amount,
            remaining=least,
            reset=duration_of(window.seconds_until_empty(now)),
            window=duration_of(rate.window_seconds),
        )

    def _refusal(self, amounts: Sequence[Amount], wanted: Amount, wait: float, now: float) -> WeftError:
        """Returns the refusal of an amount that does not fit its window.

        Its metadata has the limit, unit, window, what is left and when some is free again (resetAt, Unix seconds), and
        the tightest windows as in `status_metadata`.
        """
        rate, window = wanted.rate, self.window(wanted.key, wanted.rate)
        free_at = self._clock.utc_now().timestamp() + window.seconds_until_less(now)
        return WeftError(
            Reason.RATE_LIMIT_EXCEEDED,
            f"{wanted.who} exceeded {rate}",
            metadata={
                "limit": str(rate.amount),
                "remaining": str(window.left(now, rate.amount)),
                "resetAt": str(int(free_at) + 1),
                "unit": _UNIT_WORDS[rate.unit],
                "window": _WINDOW_WORDS[rate.window_seconds],
                **wanted.about,
                **status_metadata(self.status(amounts)),
            },
            retry_after_seconds=wait,
        )


_PARTS = ("limit", "remaining", "reset_seconds")


def status_metadata(status: RateLimitStatus) -> dict[str, str]:
    """Returns a status as error metadata, such as `limit_requests`."""
    found: dict[str, str] = {}
    for name, window in _windows_in(status):
        figures = (window.limit, window.remaining, f"{window.reset.ToNanoseconds() / 1e9:.3f}")
        found |= {f"{part}_{name}": str(figure) for part, figure in zip(_PARTS, figures, strict=True)}
    return found


def status_in(metadata: Mapping[str, str]) -> RateLimitStatus:
    """Returns the status in error metadata, empty if there is none: the inverse of `status_metadata`."""
    status = RateLimitStatus()
    for name in ("requests", "tokens"):
        limit, remaining, reset = (metadata.get(f"{part}_{name}", "") for part in _PARTS)
        try:
            found = RateLimitWindow(limit=int(limit), remaining=int(remaining), reset=duration_of(float(reset)))
        except (ValueError, OverflowError):
            continue
        getattr(status, name).CopyFrom(found)
    return status


def _windows_in(status: RateLimitStatus) -> Iterator[tuple[str, RateLimitWindow]]:
    if status.HasField("requests"):
        yield "requests", status.requests
    if status.HasField("tokens"):
        yield "tokens", status.tokens


class TrackedKeys:
    """Keys without a configured limit: a bounded number is counted separately, the others share one window."""

    def __init__(self, windows: RateWindows, prefix: str) -> None:
        """`prefix` distinguishes them from other kinds of keys."""
        self._windows = windows
        self._prefix = prefix
        self._names: OrderedDict[str, None] = OrderedDict()
        """The most recently used last."""

    def __len__(self) -> int:
        return len(self._names)

    def key_of(self, name: str, most: int) -> str:
        """Returns the key under which a name is counted; `most`: how many names are counted separately."""
        names = self._names
        if name not in names and len(names) >= most:
            self._drop_idle()
            if len(names) >= most:
                return self._prefix + ALL_OTHERS
        names[name] = None
        names.move_to_end(name)
        return self._prefix + name

    def names(self) -> list[str]:
        """Returns the names that are counted separately, and ALL_OTHERS."""
        return [*self._names, ALL_OTHERS]

    def forget(self) -> None:
        """Resets the windows of all names."""
        for name in self.names():
            self._windows.forget(self._prefix + name)

    def _drop_idle(self) -> None:
        """Removes names with empty windows. An answer may be counted long after its request, so each is looked at."""
        for name in list(islice(self._names, MAX_LOOKED_AT)):
            if self._windows.is_empty(self._prefix + name):
                del self._names[name]
            else:
                self._names.move_to_end(name)


def _with_spare(wanted: Amount) -> int:
    return min(wanted.amount + wanted.spare, wanted.rate.amount)


def within(wanted: Amount) -> int:
    """Returns the space that an amount needs: one larger than a whole window waits for an empty window."""
    return min(wanted.amount, wanted.rate.amount)
