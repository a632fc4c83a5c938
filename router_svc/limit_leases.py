"""Limits that routers share: the loop that leases slices of windows from their database, and returns them."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from router_svc.policy.leased_window import Answer, Contact, LeasedWindow, LeaseTerms, Report, rank_in
from weft.api.router.v1.request_service_pb2 import LimitSlice, LimitUse
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.health import WELL, HealthCheck, Observation, degraded
from weft.kernel.log import get_logger
from weft.kernel.service import start_critical, stop_tasks
from weft.kernel.units import Rate, RateUnit

log = get_logger("weft.router.limits")

MAX_REPORTS = 200
"""Windows of one statement."""
MAX_ROUNDS = 3
"""Leases that one request waits for, where others spend what it was given."""
FORGET_SECONDS = 60.0
"""Interval at which windows that are long empty are deleted."""
MAX_PUBLISHED_TENANTS = 10_000
"""Tenants whose served tokens are published; the one that was served longest ago is forgotten first."""
MAX_SEEN_ACCOUNTS = 100_000
"""Accounts of other routers whose last figure is remembered."""
MAX_OTHERS_TOTALS = 10_000
"""Windows of other routers whose totals are remembered, in case this one needs its share of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSubjectNames:
    """Whose window it is."""

    tenant: str
    key: str = ""
    model: str = ""
    client: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWindow:
    """A window, as the database describes it."""

    id: str
    of: LimitSubjectNames
    unit: int
    seconds: int

    def columns(self) -> dict[str, object]:
        """Returns its columns."""
        of = self.of
        about = {"tenant": of.tenant, "key": of.key, "model": of.model, "client": of.client}
        return {"id": self.id, **about, "unit": self.unit, "seconds": self.seconds}


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterContact:
    """What the database answers to a sign of life."""

    ages: Mapping[str, float]
    """The routers that share the limits, with the seconds since it heard of each."""
    totals: Mapping[str, tuple[int, float]]
    """By window that changed lately: all that was taken of it, and the seconds since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedUse:
    """One window over all routers."""

    tenant: str
    key: str
    model: str
    client: str
    unit: int
    seconds: int
    most: int
    used: int
    reset_seconds: float
    held: Mapping[str, int]
    """By router: what it holds to spend."""


class LeaseStore(Protocol):
    """Port: the ledgers. Every method raises SERVICE_UNAVAILABLE when the database fails."""

    async def open(self) -> None:
        """Opens the database."""
        ...

    async def close(self) -> None:
        """Closes it."""
        ...

    async def exchange(self, reports: Mapping[str, Report]) -> Mapping[str, Answer]:
        """Takes reports by window; returns the answers of those that exist."""
        ...

    async def create(self, windows: Sequence[NewWindow]) -> None:
        """Makes windows that do not exist."""
        ...

    async def contact(self, gone: Sequence[str]) -> RouterContact:
        """Gives a sign of life, and forgets silent routers that are gone."""
        ...

    async def forget(self) -> None:
        """Deletes what is long empty."""
        ...

    async def leave(self) -> None:
        """Takes this router from those that share the limits."""
        ...

    async def uses(self, tenant: str) -> Sequence[LeasedUse]:
        """Returns the windows of a tenant, or (empty) of all."""
        ...

    async def publish(self, served: Mapping[str, float]) -> Mapping[tuple[str, str], float]:
        """Publishes tokens by tenant that were served here; returns what changed elsewhere, by life and tenant."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseIntervals:
    """How often the loop does what."""

    contact_seconds: float = 1.0
    timeout_seconds: float = 2.0
    publish_seconds: float = 5.0


@dataclass(slots=True)
class LeaseFigures:
    """What the loop has done."""

    leases: int = 0
    """Reports that were answered."""
    failures: int = 0
    """Statements that failed."""
    waits: int = 0
    """Requests that waited for the database."""


@dataclass(slots=True)
class _Leased:
    new: NewWindow
    window: LeasedWindow
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    is_dropped: bool = False


Wanted = tuple[LeasedWindow, int, int]
"""A window, its limit, and the amount that a request needs of it."""


class LimitLeases:
    """The windows of one router, and the loop that keeps them in step with the database.

    Called from the router's event loop alone.
    """

    def __init__(
        self, store: LeaseStore, clock: Clock, name: str, terms: LeaseTerms, intervals: LeaseIntervals | None = None
    ) -> None:
        self._store = store
        self._clock = clock
        self._name = name
        self._terms = terms
        self._intervals = intervals or LeaseIntervals()
        self.contact = Contact()
        self.figures = LeaseFigures()
        self._windows: dict[str, _Leased] = {}
        self._by_window: dict[int, _Leased] = {}
        self._dirty: set[str] = set()
        self._others: dict[str, tuple[int, float]] = {}
        """Totals of windows that this router does not have, with the time of each."""
        self._hurry = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._exchange_lock = asyncio.Lock()
        self._known_routers: Callable[[], Iterable[str]] = tuple
        self._take_served: Callable[[], Mapping[str, float]] = dict
        self._served: OrderedDict[str, float] = OrderedDict()
        """Tokens of each tenant since the start; the one that was served last is the last."""
        self._unpublished: set[str] = set()
        self._note_served: Callable[[str, float], None] = _ignore_served
        self._seen: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._has_published = False
        self._ages: Mapping[str, float] = {}
        self._forgot_at = self._published_at = clock.monotonic()

    def follow(self, routers: Callable[[], Iterable[str]]) -> None:
        """Takes the routers that the registry knows: a silent one that it does not know is gone."""
        self._known_routers = routers

    def share_service(self, served: Callable[[], Mapping[str, float]], note: Callable[[str, float], None]) -> None:
        """Publishes what `served` returns, tokens by tenant since its last call; calls `note` with those of others."""
        self._take_served, self._note_served = served, note

    def window(self, key: str, rate: Rate, of: LimitSubjectNames) -> LeasedWindow:
        """Returns the window of a key and a rate."""
        found = window_id(key, rate)
        leased = self._windows.get(found)
        if leased is None:
            unit = 2 if rate.unit is RateUnit.TOKENS else 1
            window = LeasedWindow(rate.window_seconds, self._terms, self.contact)
            leased = _Leased(NewWindow(id=found, of=of, unit=unit, seconds=rate.window_seconds), window)
            if found in self._others:
                window.note_total(*self._others.pop(found))
            self._windows[found] = self._by_window[id(window)] = leased
        leased.is_dropped = False
        return leased.window

    def drop(self, key: str, rate: Rate) -> None:
        """Returns what is held of a window, and forgets it."""
        leased = self._windows.get(window_id(key, rate))
        if leased is not None:
            leased.is_dropped = True
            leased.window.release()
            self._note_dirty(leased)

    def wait_for(self, wanted: Sequence[Wanted]) -> Awaitable[None] | None:
        """Returns what a request has to wait for until its windows can admit or refuse it; None: nothing."""
        now, lacking = self._clock.monotonic(), False
        for window, most, amount in wanted:
            if window.lacks(now, most, amount):
                lacking = True
            elif window.is_low(now, amount):
                self._note_dirty(self._by_window[id(window)])
        return self._leased(wanted) if lacking else None

    @property
    def is_away(self) -> bool:
        """Whether the database does not answer."""
        return self.contact.lost_at is not None

    @property
    def away_seconds(self) -> float:
        """For how long it has not answered; 0: it does."""
        lost_at = self.contact.lost_at
        return 0.0 if lost_at is None else self._clock.monotonic() - lost_at

    async def uses(self, tenant: str = "") -> Sequence[LeasedUse]:
        """Returns the windows of all routers, what was spent here included. Raises SERVICE_UNAVAILABLE."""
        for leased in self._windows.values():
            if leased.window.has_unreported and tenant in ("", leased.new.of.tenant):
                self._dirty.add(leased.new.id)
        await self._exchange_all()
        async with asyncio.timeout(self._intervals.timeout_seconds):
            return await self._store.uses(tenant)

    def with_share(self, use: LimitUse) -> LimitUse:
        """Returns a use with what holds here while the database is away."""
        share = self.contact.share_of(use.limit)
        use.slices.append(LimitSlice(router=self._name, is_cut_off=True, share=share))
        return use

    def health_check(self, services: Sequence[str]) -> HealthCheck:
        """Returns the check of the leases; without the database requests are admitted by this router's share."""

        async def look() -> Observation:
            if not self.is_away:
                return WELL
            return degraded(
                "limits_by_share", f"the database is away: 1/{self.contact.routers} of each tenant limit holds here"
            )

        return HealthCheck(name="limit_leases", look=look, services=tuple(services), is_essential=False)

    async def start(self) -> None:
        """Opens the database, and begins. Raises SERVICE_UNAVAILABLE."""
        await self._store.open()
        await self._reach()
        self._tasks = [
            start_critical(self._exchange_always(), name="limit-leases"),
            start_critical(self._reach_always(), name="limit-contact"),
        ]

    async def stop(self) -> None:
        """Returns all slices. Safe to call twice, or when never started."""
        if not self._tasks:
            return
        tasks, self._tasks = self._tasks, []
        await stop_tasks(tasks)
        for leased in self._windows.values():
            leased.is_dropped = True
            leased.window.release()
            self._wake(leased)
        if not self.is_away:
            self._dirty.update(self._windows)
            await self._exchange_all()
            await self._quietly(self._store.leave)
        await self._store.close()

    async def _leased(self, wanted: Sequence[Wanted]) -> None:
        self.figures.waits += 1
        for _ in range(MAX_ROUNDS):
            now, waits = self._clock.monotonic(), []
            for window, most, amount in wanted:
                if window.lacks(now, most, amount):
                    leased = self._by_window[id(window)]
                    window.ask(amount)
                    waits.append(asyncio.get_running_loop().create_future())
                    leased.waiters.append(waits[-1])
                    self._note_dirty(leased)
            if not waits:
                return
            await asyncio.wait(waits)

    def _note_dirty(self, leased: _Leased) -> None:
        self._dirty.add(leased.new.id)
        self._hurry.set()

    async def _exchange_always(self) -> None:
        while True:
            await self._hurry.wait()
            self._hurry.clear()
            await self._exchange_all()

    async def _exchange_all(self) -> None:
        """Reports all windows that have something to report."""
        async with self._exchange_lock:
            while self._dirty and not self.is_away:
                await self._exchange_some([self._dirty.pop() for _ in range(min(MAX_REPORTS, len(self._dirty)))])
        if self.is_away:
            for leased in self._windows.values():
                self._wake(leased)

    async def _exchange_some(self, ids: Sequence[str]) -> None:
        leased = {each: self._windows[each] for each in ids if each in self._windows}
        waiters = [waiter for each in leased.values() for waiter in _taken(each.waiters)]
        try:
            sent_at = self._clock.monotonic()
            reports = {each: one.window.report(sent_at, takes=not one.is_dropped) for each, one in leased.items()}
            answers = await self._answers(leased, reports)
        except (WeftError, TimeoutError) as error:
            self._lose(error)
            self._dirty.update(leased)
        else:
            now = self._clock.monotonic()
            self.contact.reached_at = max(self.contact.reached_at, sent_at)
            for each, answer in answers.items():
                leased[each].window.answer(answer, sent_at, now)
                self.figures.leases += 1
                if leased[each].is_dropped and leased[each].window.is_settled:
                    self._by_window.pop(id(self._windows.pop(each).window), None)
        finally:
            for waiter in waiters:
                _set(waiter)

    async def _answers(self, leased: Mapping[str, _Leased], reports: Mapping[str, Report]) -> Mapping[str, Answer]:
        async with asyncio.timeout(self._intervals.timeout_seconds):
            answers = dict(await self._store.exchange(reports))
            missing = {each: report for each, report in reports.items() if each not in answers}
            if missing:
                await self._store.create([leased[each].new for each in sorted(missing)])
                answers |= await self._store.exchange(missing)
        return answers

    async def _reach_always(self) -> None:
        while True:
            await self._clock.sleep(self._intervals.contact_seconds)
            await self._reach()

    async def _reach(self) -> None:
        """Gives a sign of life. After an outage what was admitted meanwhile is reported before it."""
        lost_at = self.contact.lost_at
        try:
            async with asyncio.timeout(self._intervals.timeout_seconds):
                if lost_at is not None and not await self._report_outage():
                    return
                sent_at = self._clock.monotonic()
                found = await self._store.contact(self._gone)
            self._note_contact(found, sent_at)
        except (WeftError, TimeoutError) as error:
            self._lose(error)
            return
        if lost_at is not None:
            log.info("the database answers again: limits are leased", seconds=round(sent_at - lost_at, 1))
        now = self._clock.monotonic()
        for leased in self._windows.values():
            if leased.window.is_due(now) or (leased.is_dropped and leased.window.is_settled):
                self._note_dirty(leased)
        await self._do_seldom(now)

    async def _report_outage(self) -> bool:
        """Reports what was admitted without the database; returns whether all of it is in the ledgers."""
        self.contact.is_returning = True
        try:
            async with self._exchange_lock:
                pending = [each for each, leased in self._windows.items() if not leased.window.is_settled]
                # A report whose answer was lost is sent again first, and what came later with the next one.
                for _ in range(2):
                    for first in range(0, len(pending), MAX_REPORTS):
                        await self._report_only(pending[first : first + MAX_REPORTS])
            return True
        finally:
            self.contact.is_returning = False

    async def _report_only(self, ids: Sequence[str]) -> None:
        leased = {each: self._windows[each] for each in ids if each in self._windows}
        sent_at = self._clock.monotonic()
        answers = await self._answers(
            leased, {each: one.window.report(sent_at, takes=False) for each, one in leased.items()}
        )
        now = self._clock.monotonic()
        for each, answer in answers.items():
            leased[each].window.answer(answer, sent_at, now)

    def _note_contact(self, found: RouterContact, sent_at: float) -> None:
        now = self._clock.monotonic()
        self._ages = found.ages
        contact = self.contact
        contact.routers, contact.rank = max(1, len(found.ages)), rank_in(list(found.ages), self._name)
        contact.reached_at, contact.lost_at = sent_at, None
        for window, (total, age) in found.totals.items():
            leased = self._windows.get(window)
            if leased is not None:
                leased.window.note_total(total, now - age)
            else:
                self._others[window] = (total, now - age)
        while len(self._others) > MAX_OTHERS_TOTALS:
            del self._others[next(iter(self._others))]

    @property
    def _gone(self) -> list[str]:
        """The routers that neither the database nor the registry has heard of lately."""
        known = set(self._known_routers())
        if self._name not in known:
            return []
        return [name for name, age in self._ages.items() if age > self._terms.silence_seconds and name not in known]

    def _lose(self, error: WeftError | TimeoutError) -> None:
        self.figures.failures += 1
        if self.contact.lost_at is None:
            self.contact.lost_at = self._clock.monotonic()
            why = error.message if isinstance(error, WeftError) else "it took too long"
            log.warning(
                "limits cannot be leased; what is held is spent, then a share of each limit holds here",
                routers=self.contact.routers,
                why=why,
            )

    async def _do_seldom(self, now: float) -> None:
        if now - self._published_at >= self._intervals.publish_seconds:
            self._published_at = now
            await self._quietly(self._publish)
        if now - self._forgot_at >= FORGET_SECONDS:
            self._forgot_at = now
            await self._quietly(self._store.forget)

    async def _publish(self) -> None:
        is_first = not self._has_published
        for tenant, tokens in self._take_served().items():
            self._served[tenant] = self._served.get(tenant, 0.0) + tokens
            self._served.move_to_end(tenant)
            self._unpublished.add(tenant)
        while len(self._served) > MAX_PUBLISHED_TENANTS:
            self._unpublished.discard(self._served.popitem(last=False)[0])
        found = await self._store.publish({tenant: self._served[tenant] for tenant in self._unpublished})
        self._unpublished.clear()
        self._has_published = True
        for (life, tenant), tokens in found.items():
            more = tokens - self._seen.get((life, tenant), 0.0)
            # An estimate that is corrected is not charged for again.
            self._seen[life, tenant] = max(tokens, self._seen.get((life, tenant), 0.0))
            self._seen.move_to_end((life, tenant))
            if len(self._seen) > MAX_SEEN_ACCOUNTS:
                self._seen.popitem(last=False)
            # What others served before this router began was there for every account.
            if more > 0 and not is_first:
                self._note_served(tenant, more)

    async def _quietly(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(self._intervals.timeout_seconds):
                await work()
        except (WeftError, TimeoutError) as error:
            self._lose(error)

    def _wake(self, leased: _Leased) -> None:
        for waiter in _taken(leased.waiters):
            _set(waiter)


def window_id(key: str, rate: Rate) -> str:
    """Returns the id of a window in the database: of its key, its unit and its length, not of its amount."""
    return hashlib.blake2b(f"{key}\0{rate.unit.value}\0{rate.window_seconds}".encode(), digest_size=20).hexdigest()


def _taken(waiters: list[asyncio.Future[None]]) -> list[asyncio.Future[None]]:
    taken = list(waiters)
    waiters.clear()
    return taken


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _ignore_served(_tenant: str, _tokens: float) -> None:
    """Notes nothing."""
