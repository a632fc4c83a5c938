"""A window of a limit that several routers share by leases. Pure: every method takes the time.

The database has one ledger per window: what was counted, and what each router holds of it to spend. A router takes a
slice, spends it in memory, and reports what it spent when it takes the next one. A report has a number, so that one
whose answer was lost can be sent again, and counts once. What a router holds counts as spent for everyone else until
it is returned, or, where the router has gone, until it has left the window.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weft.kernel.sliding_window import SlidingWindow

REPORTED_STEPS = 128
"""Amounts within a 128th of a window leave it together, at the time of the newest."""
MAX_HELD_PART = 0.25
"""Longest time for which a slice is held, as a part of its window."""
LOW_PART = 0.5
"""The part of a slice below which the next one is taken ahead."""
ENDING_PART, RENEWED_PART = 0.05, 0.3
"""Of the time for which a slice is held: what is left when it counts as ended for a new request, and when it is renewed
ahead."""
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.05, 1.0
"""Shortest and longest time until a window without room is asked for again: others return what they hold."""
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """How large a slice is, and how long it is held."""

    slice_seconds: float = 1.0
    min_slice_part: float = 0.05
    max_hold_seconds: float = 5.0
    silence_seconds: float = 5.0
    """Time without the database after which a router may use its share of each limit, and after which the others leave
    that share to it."""

    def slice_of(self, most: int, length: float) -> int:
        """Returns the size of a slice: what the limit admits in `slice_seconds`, and at least its least part."""
        return max(1, math.ceil(most * min(1.0, max(self.min_slice_part, self.slice_seconds / length))))

    def hold_seconds(self, length: float) -> float:
        """Returns how long a slice of a window of this length may be held."""
        return min(self.max_hold_seconds, length * MAX_HELD_PART)


@dataclass(slots=True)
class Contact:
    """What one router knows of the database, and of the routers that share it. Its loop alone changes it."""

    reached_at: float = _NEVER
    """When what the database answered last was asked."""
    lost_at: float | None = None
    """When it did not; None: it answers."""
    routers: int = 1
    """Routers that share it, this one included, as of the last answer."""
    rank: int = 0
    """This router's place among them."""
    is_returning: bool = False
    """Whether what was admitted without the database is being reported: nothing more is admitted meanwhile."""

    def share_of(self, amount: int) -> int:
        """Returns this router's share of an amount; the shares of all add up to it."""
        return amount // self.routers + (self.rank < amount % self.routers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a router reports of one window, and what it asks for."""

    number: int
    most: int
    """The limit."""
    spent: tuple[tuple[float, int], ...]
    """Amounts since the last report with their age in seconds; below zero: corrections of earlier ones."""
    keep: int
    """What it still holds of its lease, and goes on to spend."""
    need: int
    """What waiting requests need beyond it ..."""
    least: int
    """... and the smallest of them."""
    want: int
    """What it would like beyond `keep`; at least `need`."""
    hold_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The ledger of one window after a report. Times are seconds from the answer on."""

    number: int
    lease: int
    """What this router holds now."""
    lease_seconds: float
    """How long it may spend it."""
    counted: tuple[tuple[float, int], ...]
    """When what was counted leaves the window, the soonest first."""
    others: tuple[tuple[float, int], ...]
    """Until when other routers may spend what they hold."""
    reserved: int
    """What is left to routers that the database has not heard of lately."""


class Amounts:
    """Amounts that leave one by one; immutable."""

    __slots__ = ("_sums", "leaves")

    def __init__(self, amounts: Iterable[tuple[float, int]] = ()) -> None:
        """`amounts`: with the time at which each leaves."""
        ordered = sorted(amounts)
        self.leaves = [at for at, _ in ordered]
        self._sums = [0]
        for _, amount in ordered:
            self._sums.append(self._sums[-1] + amount)

    def after(self, now: float) -> int:
        """Returns the sum of those that have not left."""
        return self._sums[-1] - self._sums[bisect_right(self.leaves, now)]

    def steps_after(self, now: float) -> list[tuple[float, int]]:
        """Returns those that have not left, the soonest first."""
        first = bisect_right(self.leaves, now)
        return [(self.leaves[at], self._sums[at + 1] - self._sums[at]) for at in range(first, len(self.leaves))]


@dataclass(slots=True)
class _Spent:
    began: float
    newest: float
    amount: int


@dataclass(frozen=True, slots=True)
class _Sent:
    number: int
    most: int
    spent: tuple[tuple[float, int], ...]
    """With the time of each."""
    keep: int
    need: int
    least: int
    want: int


class LeasedWindow:
    """What one router may admit by a window, and what it knows of the others'. Has the methods of a SlidingWindow."""

    def __init__(self, length: float, terms: LeaseTerms, contact: Contact) -> None:
        self.length = length
        self._terms = terms
        self._contact = contact
        self._most = 0
        self._unspent = 0
        """Of the lease; below zero: more was used than it had."""
        self._lease_ends = _NEVER
        self._holds = False
        """Whether the ledger has something of this router that has to be returned or reported."""
        self._fresh: deque[_Spent] = deque()
        """Spent since the last report."""
        self._corrections: list[tuple[float, int]] = []
        self._sent: _Sent | None = None
        """The report whose answer has not come."""
        self._number = 0
        self._waiting = 0
        self._least = 0
        self._ask_again_at = _NEVER
        self._counted, self._others, self._returning = Amounts(), Amounts(), Amounts()
        self._ledger = Amounts()
        """Everything in the ledger but this router's lease, by the time at which it leaves."""
        self._own_lease = Amounts()
        self._room = 0
        """What the ledger had left after the last answer."""
        self._reserved = 0
        self._answered_at = _NEVER
        self._alone = SlidingWindow(length)
        """What was admitted by the share, while the database was away."""

    def settle(self, now: float) -> int:
        """Returns what all routers have used, as far as it is known here."""
        return self._counted.after(now) + self._unreported(now)

    def has_room(self, now: float, most: int, amount: int) -> bool:
        """Whether an amount may be admitted here."""
        self._use(most)
        held = self._held(now)
        if held >= amount:
            return True
        return self._contact.lost_at is not None and held + self._share_left(now, most) >= amount

    def add(self, now: float, amount: int) -> None:
        """Counts an amount."""
        if self._fresh and now - self._fresh[-1].began < self.length / REPORTED_STEPS:
            self._fresh[-1].newest = now
            self._fresh[-1].amount += amount
        else:
            self._fresh.append(_Spent(now, now, amount))
        if self._contact.lost_at is None:
            self._unspent -= amount
            return
        held = min(amount, self._held(now))
        self._unspent -= held
        if amount > held:
            self._alone.settle(now)
            self._alone.add(now, amount - held)

    def take_back(self, amount: int, counted_at: float) -> None:
        """Subtracts an amount that was counted then; what was reported already is corrected in the ledger."""
        for spent in reversed(self._fresh):
            if spent.began <= counted_at <= spent.newest:
                taken = min(amount, spent.amount)
                spent.amount -= taken
                amount -= taken
                if self._alone.total:
                    self._alone.take_back(taken, counted_at)
                else:
                    self._unspent += taken
                break
        if amount:
            # A step earlier: it must not stay longer in the window than what it corrects.
            self._corrections.append((counted_at - self.length / REPORTED_STEPS, -amount))

    def left(self, now: float, most: int) -> int:
        """Returns what may still be admitted here, as far as it is known."""
        held = self._held(now)
        if self._contact.lost_at is not None:
            return min(self.shown(most), held + max(0, self._share_left(now, most)))
        return max(held, most - self._reserved - self.settle(now) - self._others.after(now))

    def shown(self, most: int) -> int:
        """Returns the limit as it holds here."""
        return most if self._contact.lost_at is None else self._contact.share_of(most)

    def seconds_until_room(self, now: float, most: int, amount: int) -> float:
        """Returns the time until an amount may fit, if nothing else is counted meanwhile."""
        if self._contact.lost_at is not None:
            return self._seconds_until_share(now, most, amount)
        steps = [*self._counted.steps_after(now), *self._returning.steps_after(now)]
        steps += [(each.newest + self.length, each.amount) for each in self._fresh]
        steps += [(at + self.length, spent) for at, spent in (self._sent.spent if self._sent else ())]
        if self._reserved:
            steps.append((now + self._terms.silence_seconds, self._reserved))
        over = sum(each for _, each in steps) + amount - most
        at = max(now + MIN_PAUSE_SECONDS, self._ask_again_at)
        for leaves, each in sorted(steps):
            if over <= 0:
                break
            over -= each
            at = max(at, leaves)
        return max(0.0, at - now)

    def seconds_until_less(self, now: float) -> float:
        """Returns the time until something leaves the window; its length where it is empty."""
        return min((at for at, _ in self._in_use(now)), default=now + self.length) - now

    def seconds_until_empty(self, now: float) -> float:
        """Returns the time until everything has left the window, if nothing else is counted meanwhile."""
        return max((at for at, _ in self._in_use(now)), default=now) - now

    def lacks(self, now: float, most: int, amount: int) -> bool:
        """Whether the database has to be asked before an amount can be admitted."""
        self._use(most)
        # A lease that ends until the request is counted is none.
        soon = now + ENDING_PART * self._terms.hold_seconds(self.length)
        if self._contact.lost_at is not None or self._held(soon) >= amount:
            return False
        return now >= self._ask_again_at or amount <= self._room

    def is_low(self, now: float, amount: int) -> bool:
        """Whether the next slice should be taken when this amount has been spent."""
        if self._contact.lost_at is not None or self._sent is not None or now < self._ask_again_at:
            return False
        soon = now + RENEWED_PART * self._terms.hold_seconds(self.length)
        return self._held(soon) - amount < LOW_PART * self._terms.slice_of(self._most, self.length)

    def ask(self, amount: int) -> None:
        """Notes a request that waits for its amount."""
        self._least = min(self._least, amount) if self._waiting else amount
        self._waiting += amount

    def is_due(self, now: float) -> bool:
        """Whether there is something to report or to return that nothing waits for."""
        if self._sent is not None or self._unspent < 0 or self._corrections:
            return True
        return now >= self._lease_ends and (self._holds or bool(self._fresh))

    @property
    def has_unreported(self) -> bool:
        """Whether something was spent that the ledger does not know."""
        return bool(self._fresh or self._corrections or self._sent)

    @property
    def is_settled(self) -> bool:
        """Whether the ledger knows everything, and this router holds nothing."""
        return not (self._holds or self._fresh or self._corrections or self._sent)

    def release(self) -> None:
        """Gives up what is held; it is returned with the next report."""
        self._unspent = min(self._unspent, 0)
        self._lease_ends = _NEVER

    def note_total(self, total: int, at: float) -> None:
        """Takes what the ledger had in all at a time; what is unknown of it counts for a whole window."""
        unknown = total - self._ledger.after(at) - self._own_lease.after(at)
        if unknown > 0 and at >= self._answered_at:
            leaves = at + self.length + self._terms.hold_seconds(self.length)
            self._ledger = Amounts([*self._ledger.steps_after(at), (leaves, unknown)])

    def report(self, now: float, *, takes: bool = True) -> Report:
        """Returns the next report; the same one again until its answer has come. `takes`: whether it asks for more."""
        if self._sent is None:
            self._sent = self._next_report(now, takes=takes)
        sent = self._sent
        return Report(
            number=sent.number,
            most=sent.most,
            spent=tuple((max(0.0, now - at), amount) for at, amount in sent.spent),
            keep=sent.keep,
            need=sent.need,
            least=sent.least,
            want=sent.want,
            hold_seconds=self._terms.hold_seconds(self.length),
        )

    def answer(self, answer: Answer, sent_at: float, now: float) -> None:
        """Takes the answer of a report that was sent at a time."""
        sent, self._sent = self._sent, None
        if sent is None or answer.number != sent.number:
            # The lease is of another report than the one that this router remembers.
            self._unspent, self._lease_ends = min(self._unspent, 0), _NEVER
            return
        self._unspent += answer.lease - sent.keep
        self._lease_ends = sent_at + answer.lease_seconds
        self._holds = answer.lease > 0
        # The answer was made before it came: what is known of others leaves a little late here, never too early.
        counted = [(now + seconds, amount) for seconds, amount in answer.counted]
        others = [(now + seconds + self.length, amount) for seconds, amount in answer.others]
        self._counted, self._others = Amounts(counted), Amounts(others)
        self._returning = Amounts((now + max(0.0, seconds), amount) for seconds, amount in answer.others)
        self._own_lease = Amounts([(now + max(0.0, answer.lease_seconds) + self.length, answer.lease)])
        self._ledger = Amounts([*counted, *others])
        self._reserved = answer.reserved
        self._answered_at = now
        if self._contact.lost_at is None:
            self._alone = SlidingWindow(self.length)
        room = sent.most - answer.reserved - self._ledger.after(now) - answer.lease
        self._room = max(0, room)
        is_short = answer.lease < sent.keep + sent.need or (room <= 0 and answer.lease < sent.keep + sent.want)
        self._ask_again_at = now + self._pause(now) if is_short else _NEVER

    def _next_report(self, now: float, *, takes: bool) -> _Sent:
        if now >= self._lease_ends:
            self._unspent = min(self._unspent, 0)
        keep = max(0, self._unspent)
        is_used = bool(self._fresh) and self._most > 0
        target = self._waiting + (self._terms.slice_of(self._most, self.length) if is_used or self._waiting else 0)
        if not takes or not target:
            keep = target = 0
        need = max(0, self._waiting - keep) if takes else 0
        least = max(0, self._least - keep) if takes else 0
        spent = [*((each.newest, each.amount) for each in self._fresh if each.amount), *self._corrections]
        self._fresh.clear()
        self._corrections.clear()
        self._waiting = self._least = 0
        self._unspent = keep
        self._number += 1
        return _Sent(self._number, self._most, tuple(spent), keep, need, least, max(need, target - keep))

    def _use(self, most: int) -> None:
        if most < self._most:
            self._unspent = min(self._unspent, self._terms.slice_of(most, self.length))
        self._most = most

    def _held(self, now: float) -> int:
        return max(0, self._unspent) if now < self._lease_ends else 0

    def _unreported(self, now: float) -> int:
        since = now - self.length
        sent = self._sent.spent if self._sent is not None else ()
        return sum(each.amount for each in self._fresh if each.newest > since) + sum(
            amount for at, amount in (*sent, *self._corrections) if at > since
        )

    def _in_use(self, now: float) -> list[tuple[float, int]]:
        spent = self._sent.spent if self._sent is not None else ()
        found = [*self._counted.steps_after(now), *((at + self.length, amount) for at, amount in spent)]
        found += [(each.newest + self.length, each.amount) for each in self._fresh]
        return [(at, amount) for at, amount in found if at > now]

    def _pause(self, now: float) -> float:
        nearest = min((*self._counted.leaves, *self._returning.leaves), key=lambda at: (at <= now, at), default=now)
        return min(MAX_PAUSE_SECONDS, max(MIN_PAUSE_SECONDS, nearest - now))

    def _capacity(self, now: float, most: int, at: float) -> int:
        """Returns this router's share of what was free when the database was lost, and of what has left until `at`.

        What left before the others leave this router its share they may have taken, and hold for a whole window.
        """
        # What was leased and spent, or may be, is of this router alone: the others count it as taken.
        leased = self._unreported(now) - self._alone.settle(now) + self._held(now)
        begins = self._share_begins
        if at >= begins + self.length + self._terms.hold_seconds(self.length):
            return self._contact.share_of(max(0, most - leased))
        free = max(0, most - self._ledger.after(self._contact.reached_at) - leased)
        return self._contact.share_of(min(most, free + self._ledger.after(begins) - self._ledger.after(at)))

    def _share_left(self, now: float, most: int) -> int:
        if self._contact.is_returning or now < self._share_begins:
            return 0
        return self._capacity(now, most, now) - self._alone.settle(now)

    @property
    def _share_begins(self) -> float:
        """When the others have left this router's share to it: they must not have heard of it for as long."""
        lost_at = self._contact.lost_at
        return float("inf") if lost_at is None else lost_at + self._terms.silence_seconds

    def _seconds_until_share(self, now: float, most: int, amount: int) -> float:
        begins = max(now, self._share_begins)
        used = self._alone.settle(now)
        over = begins + self.length + self._terms.hold_seconds(self.length)
        for at in (begins, *(each for each in self._ledger.leaves if each > begins), max(now, over)):
            full = self._capacity(now, most, at)
            if full >= amount:
                return max(at - now, self._alone.seconds_until_room(now, full, amount) if used + amount > full else 0.0)
        return self.length


def routers_share(most: int, silent: int, routers: int) -> int:
    """Returns the shares of `silent` of so many routers: the most that they may admit without the database."""
    return silent * (most // routers) + min(silent, most % routers)


def granted(*, room: int, need: int, least: int, want: int, routers: int) -> int:
    """Returns how much of the room in a ledger a router gets beyond what it keeps.

    What its requests need; beyond it at most its part of what remains, so that the last of a limit is not held by one
    router while another one needs it. Where not all fits, what there is, unless even the smallest request does not fit.
    """
    if room >= need:
        return min(room, max(need, min(want, need - (-(room - need) // routers))))
    return room if 0 < least <= room else 0


def rank_in(names: Sequence[str], name: str) -> int:
    """Returns the place of a router among the names."""
    return sorted(names).index(name) if name in names else len(names)
