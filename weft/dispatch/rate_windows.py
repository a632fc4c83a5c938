"""Sliding-window rate limits for many keys, on a `Clock`.

A window is identified by key, unit and length, not by its limit, so its count survives a change of the limit.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from weft.api.common.v1.rate_limit_pb2 import RateLimitStatus, RateLimitWindow
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.timestamps import duration_of
from weft.kernel.units import DAY, HOUR, MINUTE, MONTH, SECOND, WEEK, Rate, RateUnit

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


ALL_OTHERS = "+everybody-else"
"""The key shared by all keys beyond a limit. It cannot collide: other names begin with a letter or a digit."""
_WINDOW_WORDS: Mapping[int, str] = MappingProxyType(
    {SECOND: "second", MINUTE: "minute", HOUR: "hour", DAY: "day", WEEK: "week", MONTH: "month"}
)
_UNIT_WORDS: Mapping[RateUnit, str] = MappingProxyType({RateUnit.REQUESTS: "requests", RateUnit.TOKENS: "tokens"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
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
    """Counts in this process. Not thread-safe: called from one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._windows: dict[tuple[str, RateUnit, int], SlidingWindow] = {}

    def take(self, claims: Sequence[Claim]) -> float:
        """Counts all claims or none; returns the monotonic time, for later corrections.

        A claim above the whole limit is accepted when its window is empty. Raises RATE_LIMIT_EXCEEDED for the claim
        with the longest wait, see `_refusal`.
        """
        now = self._clock.monotonic()
        windows = [self.window(claim.key, claim.rate) for claim in claims]
        refused = [
            (window.seconds_until_room(now, claim.rate.amount, _with_spare(claim)), place)
            for place, (claim, window) in enumerate(zip(claims, windows, strict=True))
            if not window.has_room(now, claim.rate.amount, within(claim))
            or (claim.spare and window.left(now, claim.rate.amount) < _with_spare(claim))
        ]
        if refused:
            wait, place = max(refused, key=lambda each: (each[0], -each[1]))
            raise self._refusal(claims, claims[place], wait, now)
        for claim, window in zip(claims, windows, strict=True):
            window.add(now, claim.amount)
        return now

    def correct(self, key: str, rate: Rate, amount: int, *, counted_at: float) -> None:
        """Adds an amount, which may be negative, regardless of the limit.

        A negative amount is taken from the time `counted_at`; if that has left the window, nothing changes.
        """
        now, window = self._clock.monotonic(), self._windows.get(_id(key, rate))
        if window is None:
            return
        window.settle(now)
        if amount > 0:
            window.add(now, amount)
        else:
            window.take_back(-amount, counted_at)

    def counted(self, key: str, rate: Rate) -> int:
        """Returns the current count of a window."""
        window = self._windows.get(_id(key, rate))
        return 0 if window is None else window.settle(self._clock.monotonic())

    def reset_seconds(self, key: str, rate: Rate) -> float:
        """Returns the time until a window is empty if nothing else is counted."""
        window = self._windows.get(_id(key, rate))
        return 0.0 if window is None else window.seconds_until_empty(self._clock.monotonic())

    def status(self, claims: Sequence[Claim]) -> RateLimitStatus:
        """Returns what is left for such claims, by the tightest window of each unit."""
        return RateLimitStatus(
            requests=self._tightest(claims, RateUnit.REQUESTS), tokens=self._tightest(claims, RateUnit.TOKENS)
        )

    def forget(self, key: str, rate: Rate) -> None:
        """Resets a window."""
        self._windows.pop(_id(key, rate), None)

    def window(self, key: str, rate: Rate) -> SlidingWindow:
        """Returns the window of a key and a rate, created empty if needed."""
        found = self._windows.get(_id(key, rate))
        if found is None:
            found = self._windows[_id(key, rate)] = SlidingWindow(rate.window_seconds)
        return found

    def _tightest(self, claims: Sequence[Claim], unit: RateUnit) -> RateLimitWindow | None:
        """Returns the window with the least left; if equal, the one that resets last."""
        now, least = self._clock.monotonic(), -1
        tightest: list[tuple[Rate, SlidingWindow]] = []
        for claim in claims:
            rate = claim.rate
            if rate.unit is not unit:
                continue
            window = self.window(claim.key, rate)
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

    def _refusal(self, claims: Sequence[Claim], claim: Claim, wait: float, now: float) -> WeftError:
        """Returns the refusal of a claim that does not fit its window.

        Its metadata has the limit, unit, window, what is left and when some is free again (resetAt, Unix seconds), and
        the tightest windows as in `status_metadata`.
        """
        rate, window = claim.rate, self.window(claim.key, claim.rate)
        free_at = self._clock.utc_now().timestamp() + window.seconds_until_less(now)
        return WeftError(
            Reason.RATE_LIMIT_EXCEEDED,
            f"{claim.who} exceeded {rate}",
            metadata={
                "limit": str(rate.amount),
                "remaining": str(window.left(now, rate.amount)),
                "resetAt": str(int(free_at) + 1),
                "unit": _UNIT_WORDS[rate.unit],
                "window": _WINDOW_WORDS[rate.window_seconds],
                **claim.about,
                **status_metadata(self.status(claims)),
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

    def __init__(self, windows: RateWindows, rates: Sequence[Rate], max_keys: int, prefix: str, clock: Clock) -> None:
        """`rates` apply to each such key; `prefix` distinguishes them from other kinds of keys."""
        self._windows = windows
        self._rates = tuple(rates)
        self._max_keys = max_keys
        self._prefix = prefix
        self._clock = clock
        self._longest_window = max((rate.window_seconds for rate in rates), default=0)
        self._last_seen: OrderedDict[str, float] = OrderedDict()
        """Monotonic times, oldest first."""

    def __len__(self) -> int:
        return len(self._last_seen)

    def key_of(self, name: str) -> str:
        """Returns the key under which a name is counted."""
        seen, now = self._last_seen, self._clock.monotonic()
        if name not in seen and len(seen) >= self._max_keys:
            self._forget_idle(now)
            if len(seen) >= self._max_keys:
                return self._prefix + ALL_OTHERS
        seen[name] = now
        seen.move_to_end(name)
        return self._prefix + name

    def release(self, name: str) -> bool:
        """Stops tracking a name but keeps its windows; returns whether it was counted separately."""
        return self._last_seen.pop(name, None) is not None

    def names(self) -> list[str]:
        """Returns the names that are counted separately, and ALL_OTHERS."""
        return [*self._last_seen, ALL_OTHERS]

    def use(self, rates: Sequence[Rate]) -> None:
        """Changes the rates; windows with the same unit and length keep their count."""
        kept = {(rate.unit, rate.window_seconds) for rate in rates}
        self._forget(rate for rate in self._rates if (rate.unit, rate.window_seconds) not in kept)
        self._rates = tuple(rates)
        self._longest_window = max((rate.window_seconds for rate in rates), default=0)

    def forget_all(self) -> None:
        """Removes all keys and their windows."""
        self._forget(self._rates)
        self._last_seen.clear()

    def _forget(self, rates: Iterable[Rate]) -> None:
        rates = tuple(rates)
        for name in self.names():
            for rate in rates:
                self._windows.forget(self._prefix + name, rate)

    def _forget_idle(self, now: float) -> None:
        """Removes keys with empty windows."""
        # A bucket leaves the window with its newest entry.
        longest = self._longest_window * (1 + 1 / BUCKETS_PER_WINDOW)
        while self._last_seen:
            name, last = next(iter(self._last_seen.items()))
            if now - last <= longest:
                return
            key = self._prefix + name
            if any(self._windows.counted(key, rate) for rate in self._rates):
                # An answer is counted at its end, possibly long after its request arrived.
                self._last_seen[name] = now
                self._last_seen.move_to_end(name)
                continue
            del self._last_seen[name]
            for rate in self._rates:
                self._windows.forget(key, rate)


def _id(key: str, rate: Rate) -> tuple[str, RateUnit, int]:
    return key, rate.unit, rate.window_seconds


def _with_spare(claim: Claim) -> int:
    return min(claim.amount + claim.spare, claim.rate.amount)


def within(claim: Claim) -> int:
    """Returns the space that a claim needs: one larger than a whole window waits for an empty window."""
    return min(claim.amount, claim.rate.amount)
