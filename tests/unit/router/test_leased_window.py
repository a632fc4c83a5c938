"""Routers that lease slices of one window never admit more than its limit together, whatever is lost on the way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.limit_ledger import Ledger

from router_svc.policy.leased_window import (
    Answer,
    Contact,
    LeasedWindow,
    LeaseTerms,
    Report,
    routers_share,
)
from weft.kernel.units import DAY, HOUR, MINUTE, MONTH, SECOND, WEEK

LENGTHS = st.sampled_from([SECOND, MINUTE, HOUR, DAY, WEEK, MONTH])
NAMES = ("one", "two", "three")
TERMS = LeaseTerms()


@dataclass(slots=True)
class Message:
    sent_at: float
    report: Report
    holder: str
    answer: Answer | None = None


@dataclass(slots=True)
class Router:
    name: str
    window: LeasedWindow
    contact: Contact
    life: int = 1
    message: Message | None = None

    @property
    def holder(self) -> str:
        return f"{self.name}/{self.life}"


def a_window(length: float, contact: Contact | None = None) -> LeasedWindow:
    return LeasedWindow(length, TERMS, contact or Contact(reached_at=0.0))


def made_by(kind: type[LeasedWindow]) -> Callable[[float, Contact], LeasedWindow]:
    def make(length: float, contact: Contact) -> LeasedWindow:
        return kind(length, TERMS, contact)

    return make


@dataclass(slots=True)
class World:
    """Routers with one ledger, stepped by hand; messages are lost where a step says so."""

    length: float
    most: int
    make: Callable[[float, Contact], LeasedWindow] = a_window
    now: float = 1_000.0
    taken: list[tuple[float, int]] = field(default_factory=list)
    routers: dict[str, Router] = field(default_factory=dict)
    ledger: Ledger = field(init=False)
    refused: int = 0
    heard_at: dict[str, float] = field(default_factory=dict)
    is_away: bool = False
    cut: set[str] = field(default_factory=set)
    """Routers that do not reach the database, while the others do."""

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.length)
        for name in NAMES:
            contact = Contact(reached_at=self.now, routers=len(NAMES), rank=NAMES.index(name))
            self.routers[name] = Router(name, self.make(self.length, contact), contact)
            self.heard_at[name] = self.now

    def wait(self, seconds: float) -> None:
        """Time passes, in which every router gives its signs of life if it can."""
        self.now += seconds
        if not self.is_away:
            self.heard_at |= dict.fromkeys(set(NAMES) - self.cut, self.now)

    def answer(self, holder: str, report: Report) -> Answer:
        since, name = self.now - TERMS.silence_seconds, holder.partition("/")[0]
        silent = sum(at <= since for other, at in self.heard_at.items() if other != name)
        return self.ledger.report(holder, report, self.now, routers=len(NAMES), silent=silent)

    def ask(self, name: str, amount: int) -> None:
        router = self.routers[name]
        window = router.window
        if window.has_room(self.now, self.most, amount):
            window.add(self.now, amount)
            self.taken.append((self.now, amount))
        elif window.lacks(self.now, self.most, amount):
            window.ask(amount)
        else:
            # What a refusal says changes nothing.
            assert window.seconds_until_room(self.now, self.most, amount) >= 0
            assert 0 <= window.left(self.now, self.most) <= self.most
            assert window.seconds_until_empty(self.now) >= 0
            self.refused += 1

    def send(self, name: str) -> None:
        router = self.routers[name]
        router.message = Message(self.now, router.window.report(self.now), router.holder)

    def arrive(self, name: str) -> None:
        """A report reaches the database; it may do so twice."""
        message = self.routers[name].message
        if message is not None and not self.is_away and name not in self.cut:
            message.answer = self.answer(message.holder, message.report)

    def hear(self, name: str) -> None:
        router, message = self.routers[name], self.routers[name].message
        if message is not None and message.answer is not None and message.holder == router.holder:
            router.window.answer(message.answer, message.sent_at, self.now)
            router.contact.reached_at = self.now
            router.message = None

    def whole(self, name: str) -> None:
        """Nothing is lost."""
        self.send(name)
        self.arrive(name)
        self.hear(name)

    def lose(self, name: str) -> None:
        self.routers[name].message = None

    def kill(self, name: str) -> None:
        router = self.routers[name]
        router.window, router.message = self.make(self.length, router.contact), None
        router.life += 1

    def take_back(self, name: str) -> None:
        """A request that this router has just admitted is given back."""
        if self.taken and self.taken[-1][0] == self.now:
            at, amount = self.taken[-1]
            window = self.routers[name].window
            if any(spent.amount for spent in window._fresh if spent.newest == at):
                self.taken.pop()
                window.take_back(amount, at)

    def outage(self) -> None:
        """The database is away, from a moment at which every router knows its ledger."""
        self.is_away = True
        for name, router in self.routers.items():
            router.window.note_total(self.ledger.total(self.now) + self.ledger.held(), self.now)
            router.contact.reached_at = self.heard_at[name] = self.now
            router.contact.lost_at = self.now

    def cut_off(self, name: str) -> None:
        """One router is cut off from the database, when it has just read it."""
        self.cut.add(name)
        router = self.routers[name]
        router.message = None
        router.window.note_total(self.ledger.total(self.now) + self.ledger.held(), self.now)
        router.contact.reached_at = router.contact.lost_at = self.heard_at[name] = self.now

    def comes_back(self, order: Sequence[str], asks: int) -> None:
        """Routers reach it one after the other, and those that do go on to take what they can."""
        self.is_away = False
        self.cut.clear()
        for name in order:
            router = self.routers[name]
            router.message = None
            for _ in range(2):
                report = router.window.report(self.now, takes=False)
                router.window.answer(self.answer(router.holder, report), self.now, self.now)
            router.contact.reached_at = self.heard_at[name] = self.now
            router.contact.lost_at = None
            for _ in range(asks):
                self.ask(name, 1)
                self.whole(name)

    def most_in_any_window(self) -> int:
        return most_in_any_window(self.taken, self.length)


def most_in_any_window(taken: Sequence[tuple[float, int]], length: float) -> int:
    return max((sum(amount for at, amount in taken if end - length < at <= end) for end, _ in taken), default=0)


Steps = Sequence[tuple[str, str, int]]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(NAMES), st.integers(1, 4)),
        st.tuples(st.just("burst"), st.sampled_from(NAMES), st.integers(1, 9)),
        st.tuples(st.sampled_from(["send", "arrive", "hear", "lose", "kill"]), st.sampled_from(NAMES), st.just(0)),
        st.tuples(st.just("whole"), st.sampled_from(NAMES), st.just(0)),
        st.tuples(st.just("wait"), st.just(""), st.integers(1, 300)),
    ),
    max_size=120,
)


@given(
    length=LENGTHS,
    most=st.integers(1, 40),
    before=STEPS,
    during=STEPS,
    after=STEPS,
    order=st.permutations(NAMES),
    asks=st.integers(0, 20),
)
def test_an_outage_that_all_routers_see_admits_no_more_than_the_limit(
    length: int,
    most: int,
    before: list[tuple[str, str, int]],
    during: list[tuple[str, str, int]],
    after: list[tuple[str, str, int]],
    order: list[str],
    asks: int,
) -> None:
    world = World(length, most)
    run(world, before)
    world.outage()
    run(world, [step for step in during if step[0] != "kill"])
    world.comes_back(order, asks)
    run(world, after)
    assert world.most_in_any_window() <= most


def _cut_off(kind: Callable[[float, Contact], LeasedWindow], length: float, most: int, during: Steps) -> World:
    """One router is cut off when all of a limit is taken, and the others take what leaves the window."""
    world = World(length, most, kind)
    while world.ledger.total(world.now) + world.ledger.held() < most:
        run(world, [("burst", "two", 9), ("burst", "three", 3)])
        world.wait(length / 100)
    world.cut_off("one")
    run(world, during)
    world.comes_back(["one"], 20)
    return world


@given(length=LENGTHS, most=st.integers(1, 40), during=STEPS, after=STEPS)
def test_a_router_that_is_cut_off_alone_adds_nothing_to_what_the_others_take(
    length: int, most: int, during: list[tuple[str, str, int]], after: list[tuple[str, str, int]]
) -> None:
    world = _cut_off(a_window, length, most, [step for step in during if step[:2] != ("kill", "one")])
    run(world, after)
    assert world.most_in_any_window() <= most


class _Hasty(LeasedWindow):
    """Takes its share at once, before the others can know that they have to leave it."""

    @property
    def _share_begins(self) -> float:
        return self._contact.lost_at or 0.0


def test_a_share_that_is_taken_too_soon_is_found() -> None:
    one_of_two = [("wait", "", 10), ("ask", "two", 1), ("whole", "two", 0), ("ask", "two", 1)]
    for kind, is_broken in ((_Hasty, True), (LeasedWindow, False)):
        world = World(MINUTE, 40, made_by(kind))
        # At first two come in in a second and a half, which leave the window one after the other a minute later.
        run(world, [*one_of_two * 50, *[("ask", "two", 1), ("whole", "two", 0)] * 20])
        run(world, [("ask", "one", 1), ("whole", "one", 0)])
        world.cut_off("one")
        run(world, [*one_of_two, ("ask", "one", 1)] * 40)
        assert (world.most_in_any_window() > 40) is is_broken


def test_without_the_database_every_router_admits_its_share_after_a_while() -> None:
    world = World(MINUTE, 20)
    world.outage()
    for name in NAMES:
        world.ask(name, 1)
    assert world.taken == [], "the others may not know yet that this router has to be left its share"
    world.now += TERMS.silence_seconds
    for name in NAMES * 10:
        world.ask(name, 1)
    assert sum(amount for _, amount in world.taken) == 20, "7, 7 and 6"
    window = world.routers["three"].window
    assert (window.shown(20), window.left(world.now, 20)) == (6, 0)
    assert window.seconds_until_room(world.now, 20, 1) == pytest.approx(60, abs=1)


@given(most=st.integers(0, 1000), routers=st.integers(1, 12))
def test_shares_add_up_to_the_limit_and_those_of_some_are_enough_for_them(most: int, routers: int) -> None:
    shares = sorted((Contact(routers=routers, rank=rank).share_of(most) for rank in range(routers)), reverse=True)
    assert sum(shares) == most
    for silent in range(routers + 1):
        assert routers_share(most, silent, routers) == sum(shares[:silent])


class _Sharing(LeasedWindow):
    """Takes a share of the whole limit, whatever was taken before the outage."""

    def _capacity(self, now: float, most: int, at: float) -> int:
        return self._contact.share_of(most)


def test_a_share_of_what_is_taken_already_is_found() -> None:
    def make(length: float, contact: Contact) -> LeasedWindow:
        return _Sharing(length, TERMS, contact)

    for kind, at_most in ((make, 34), (a_window, 20)):
        world = World(MINUTE, 20, kind)
        run(world, [("burst", "one", 9), ("burst", "one", 9), ("burst", "one", 9)])
        world.outage()
        world.now += TERMS.silence_seconds
        for name in NAMES * 10:
            world.ask(name, 1)
        assert world.most_in_any_window() >= 20
        assert (world.most_in_any_window() > 20) == (at_most > 20)


def run(world: World, steps: Sequence[tuple[str, str, int]]) -> None:
    for what, name, amount in steps:
        if what == "wait":
            world.wait(world.length * amount / 400)
        elif what == "ask":
            world.ask(name, amount)
        elif what == "burst":
            for _ in range(amount):
                world.ask(name, 1)
                world.whole(name)
        else:
            getattr(world, what)(name)


@given(length=LENGTHS, most=st.integers(1, 40), steps=STEPS)
def test_no_window_has_more_than_the_limit_over_all_routers(
    length: int, most: int, steps: list[tuple[str, str, int]]
) -> None:
    world = World(length, most)
    run(world, steps)
    assert world.most_in_any_window() <= most


class _Careless(LeasedWindow):
    """Goes on to spend a lease that has ended."""

    def _held(self, now: float) -> int:
        return max(0, self._unspent)


class _Forgetful(LeasedWindow):
    """Reports nothing of what it spent."""

    def report(self, now: float, *, takes: bool = True) -> Report:
        return replace(super().report(now, takes=takes), spent=())


def _spend_later(world: World) -> None:
    """One router takes a slice, and spends it when another one has been given it again."""
    world.ask("one", 10)
    world.whole("one")
    world.wait(world.length * 1.1)
    for _ in range(8):
        world.ask("two", 5)
        world.whole("two")
    world.ask("one", 10)


def _spend_twice(world: World) -> None:
    for _ in range(30):
        world.ask("one", 5)
        world.whole("one")


@pytest.mark.parametrize(("kind", "play"), [(_Careless, _spend_later), (_Forgetful, _spend_twice)])
def test_a_window_that_breaks_its_lease_is_found(kind: Any, play: Callable[[World], None]) -> None:
    def make(length: float, contact: Contact) -> LeasedWindow:
        window: LeasedWindow = kind(length, TERMS, contact)
        return window

    broken = World(MINUTE, 20, make)
    play(broken)
    assert broken.most_in_any_window() > 20
    sound = World(MINUTE, 20)
    play(sound)
    assert sound.most_in_any_window() <= 20


def test_all_of_a_limit_can_be_used_by_whichever_router_needs_it() -> None:
    world = World(MINUTE, 20)
    for turn in range(200):
        name = NAMES[turn % 3]
        world.ask(name, 1)
        world.whole(name)
        world.ask(name, 1)
        world.wait(0.1)
    assert sum(amount for _, amount in world.taken) == 20


def test_a_lease_that_is_not_used_is_returned_when_it_ends() -> None:
    world = World(MINUTE, 20)
    world.ask("one", 1)
    world.whole("one")
    world.ask("one", 1)
    window = world.routers["one"].window
    assert not window.is_due(world.now)
    world.wait(TERMS.hold_seconds(MINUTE))
    assert window.is_due(world.now)
    world.whole("one")
    world.wait(TERMS.hold_seconds(MINUTE))
    world.whole("one")
    assert (world.ledger.total(world.now), world.ledger.held(), window.is_settled) == (1, 0, True)


def test_tokens_beyond_a_lease_are_counted_and_those_too_many_taken_back() -> None:
    world = World(MINUTE, 20)
    window = world.routers["one"].window
    world.ask("one", 1)
    world.whole("one")
    world.ask("one", 1)
    window.add(world.now, 25)
    assert window.is_due(world.now)
    world.whole("one")
    assert (world.ledger.total(world.now), world.ledger.held()) == (26, 0)
    assert window.left(world.now, 20) == 0
    window.take_back(20, world.now)
    world.whole("one")
    assert world.ledger.total(world.now) == 6


def test_a_lowered_limit_holds_for_what_is_leased_already() -> None:
    world = World(MINUTE, 1000)
    world.ask("one", 1)
    world.whole("one")
    window = world.routers["one"].window
    assert window.has_room(world.now, 1000, 40)
    assert not window.has_room(world.now, 10, 2)
    world.most = 10
    world.whole("one")
    assert world.ledger.held() <= 1


def test_what_is_left_is_true_for_this_router() -> None:
    world = World(MINUTE, 20)
    for _ in range(5):
        world.ask("one", 1)
        world.whole("one")
        world.ask("one", 1)
    taken = sum(amount for _, amount in world.taken)
    world.ask("two", 1)
    world.whole("two")
    assert world.routers["two"].window.left(world.now, 20) <= 20 - taken
    assert world.routers["two"].window.settle(world.now) <= taken
