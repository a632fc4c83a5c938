"""One step of the book: what is over ends, what became free is granted, whoever is idle is asked to give way."""

import secrets
from collections.abc import Iterable, Sequence

import structlog

from registry_svc.config import LedgerConfig
from registry_svc.ledger.evictions import Asker
from registry_svc.ledger.lease_store import LeaseStore
from registry_svc.ledger.lease_table import Book
from registry_svc.ledger.policy.eviction import Reclaim
from registry_svc.ledger.policy.leases import (
    Grant,
    Lease,
    LeaseState,
    Shares,
    Wish,
    is_forgotten,
    is_orphaned,
    is_over,
    orphaned,
    released,
)
from registry_svc.ledger.policy.wait_queue import LinePlan, plan_line
from registry_svc.ledger.wait_queue import Line, waited_in_vain, waiting_for
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError

log = structlog.get_logger("weft.registry.ledger")

LEASE_ID_BYTES = 16
HEARD_WITHIN_SECONDS = 1.0
"""Who hangs up with the answer in hand renews within this time; who hung up before it came never does."""


class Settler:
    """Whoever calls it has the turn to write: it is the only one that adds leases and takes them away."""

    def __init__(
        self, book: Book, line: Line, asker: Asker, store: LeaseStore, clock: Clock, config: LedgerConfig
    ) -> None:
        self._book = book
        self._line = line
        self._asker = asker
        self._store = store
        self._clock = clock
        self._config = config
        self._last_fencing_number = 0
        self._grace_until = 0.0
        self._doubtful: list[str] = []
        """Grants that the store did not acknowledge, and may hold all the same."""
        self._ending: frozenset[str] = frozenset()
        """Leases whose end is being written."""
        self._abandoned: dict[str, float] = {}
        """Leases whose caller has gone, and when they are given up, in monotonic seconds."""
        self._unheard: dict[str, object] = {}
        """Leases that were never renewed, and the call that was told of them last."""

    def begin(self, last_fencing_number: int) -> None:
        """Start from what the store knows; for the time of grace nobody is orphaned."""
        self._last_fencing_number = last_fencing_number
        self.extend_grace()

    def extend_grace(self) -> None:
        """Nobody could reach the registry until now."""
        self._grace_until = self._clock.monotonic() + self._config.restart_grace_seconds

    def tell(self, lease: Lease, caller: object) -> None:
        """A caller is about to be told of its lease, which it has never renewed."""
        if lease.grant.id in self._unheard:
            self._unheard[lease.grant.id] = caller

    def heard(self, lease_id: str) -> None:
        """A lease was renewed: its holder knows of it."""
        self._unheard.pop(lease_id, None)

    def is_ending(self, lease_id: str) -> bool:
        """Whether a lease is over but for the disk: a holder that comes back now comes too late."""
        return lease_id in self._ending

    def is_one_at_its_end(self, leases: Iterable[Lease]) -> bool:
        """Whether a step would end one of these now."""
        now = self._clock.monotonic()
        return any(self._is_at_its_end(lease, now) for lease in leases)

    def abandon(self, lease: Lease, caller: object, *, may_have_heard: bool) -> None:
        """A caller has gone. Its lease is given up, unless another call has been told of it or it is renewed first."""
        if self._unheard.get(lease.grant.id) is caller:
            patience = HEARD_WITHIN_SECONDS if may_have_heard else 0.0
            self._abandoned[lease.grant.id] = self._clock.monotonic() + patience

    async def settle(self) -> None:
        """One step. Raises SERVICE_UNAVAILABLE when the store fails; the next step does again what is left."""
        try:
            await self._step()
        except WeftError as error:
            # Nobody waits for longer than it said because the database is away.
            self._end_waits(error)
            raise
        self._end_waits()

    async def _step(self) -> None:
        await self._remove_doubtful()
        now = self._clock.monotonic()
        self._orphan(now)
        await self._give_up_abandoned()
        await self._end(now)
        for host in self._line.hosts():
            await self._serve(host)
        self._asker.sweep(self._config.reclaim_wait_seconds)
        self._book.forget_hosts(now)

    async def release(self, leases: Sequence[Lease]) -> None:
        """Give up leases for their holders: durable first."""
        if not leases:
            return
        await self._store.save_releasing([lease.grant.id for lease in leases])
        now = self._clock.monotonic()
        for lease in leases:
            # What was learnt of it during the write stays.
            current = self._book.lease(lease.grant.id)
            if current is not None and current.state is not LeaseState.RELEASING:
                self._book.put(released(current, now))
            self._unheard.pop(lease.grant.id, None)

    async def _remove_doubtful(self) -> None:
        if self._doubtful:
            await self._store.remove(self._doubtful)
            self._doubtful.clear()

    def _orphan(self, now: float) -> None:
        for lease in self._book:
            if is_orphaned(lease, now, self._config.lease_time_to_live_seconds, self._grace_until):
                self._book.put(orphaned(lease, now))
                log.warning("lease orphaned", **_facts(lease.grant))

    async def _give_up_abandoned(self) -> None:
        now = self._clock.monotonic()
        given_up = [lease_id for lease_id, at in self._abandoned.items() if now >= at]
        leases = [lease for lease_id in given_up if (lease := self._book.lease(lease_id)) is not None]
        # Who renewed it in the meantime has heard of it after all.
        await self.release([lease for lease in leases if lease.grant.id in self._unheard])
        for lease_id in given_up:
            self._abandoned.pop(lease_id, None)

    async def _end(self, now: float) -> None:
        over = [lease for lease in self._book if self._is_at_its_end(lease, now)]
        if not over:
            return
        self._ending = frozenset(lease.grant.id for lease in over)
        try:
            await self._store.remove(sorted(self._ending))
        finally:
            self._ending = frozenset()
        for lease in over:
            self._book.drop(lease)
            self._unheard.pop(lease.grant.id, None)
            log.info("lease over", **_facts(lease.grant))

    def _is_at_its_end(self, lease: Lease, now: float) -> bool:
        if lease.since is None:
            return False
        host = self._book.host(lease.grant.host)
        if host is not None and is_over(lease, host.sight, host.seen, self._config.renew_interval_seconds):
            return True
        return is_forgotten(lease, now, 0.0 if host is None else host.seen, self._config.orphan_keep_seconds)

    async def _serve(self, host: str) -> None:
        while (plan := self._plan(host)) is not None and plan.grants:
            # One at a time: the next is decided on after what happened during the write.
            await self._grant(*plan.grants[0])
        if plan is None:
            return
        for wish, lease in plan.asks:
            self._asker.ask(wish, lease)
        self._tell(host)

    def _plan(self, host: str) -> LinePlan | None:
        book, seen = self._book.open(host), self._book.host(host)
        if book is None or seen is None:
            return None
        reclaim = Reclaim(
            asks=self._asker.asks(),
            wait_seconds=self._config.reclaim_wait_seconds,
            look_seconds=self._config.renew_interval_seconds,
            seen=seen.seen,
            now=self._clock.monotonic(),
        )
        return plan_line(book, self._book.leases_on(host), [each.wish for each in self._line.on(host)], reclaim)

    async def _grant(self, wish: Wish, shares: Shares) -> None:
        self._last_fencing_number += 1
        grant = Grant(
            id=f"lease-{secrets.token_hex(LEASE_ID_BYTES)}",
            fencing_number=self._last_fencing_number,
            request_id=wish.request_id,
            host=wish.host,
            holder=wish.holder,
            purpose=wish.purpose,
            shares=shares,
            pinned=wish.pinned,
            priority=wish.priority,
            created_at=self._clock.utc_now(),
        )
        self._doubtful.append(grant.id)
        try:
            await self._store.grant(grant)
        except WeftError as error:
            self._refuse(wish, error)
            raise
        self._doubtful.remove(grant.id)
        lease = Lease(
            grant=grant,
            state=LeaseState.HELD,
            renewed=self._clock.monotonic(),
            priority=wish.priority,
            pinned=wish.pinned,
        )
        self._book.put(lease)
        log.info("lease granted", **_facts(grant), shares=shares)
        waiter = self._line.find(wish.host, wish.key)
        self._unheard[grant.id] = waiter
        if waiter is None:
            self._abandoned[grant.id] = self._clock.monotonic()
            await self._give_up_abandoned()
        else:
            self._line.finish(waiter, lease)

    def _refuse(self, wish: Wish, error: WeftError) -> None:
        waiter = self._line.find(wish.host, wish.key)
        if waiter is not None:
            self._line.finish(waiter, error)

    def _tell(self, host: str) -> None:
        book = self._book.open(host)
        if book is None:
            return
        leases = self._book.leases_on(host)
        for ahead, waiter in enumerate(sorted(self._line.on(host), key=lambda each: each.wish.place)):
            waiter.tell(waiting_for(waiter.wish, book, leases, ahead))

    def _end_waits(self, failure: WeftError | None = None) -> None:
        """End the waits whose time is over: with `failure`, where that is why nobody looked after them."""
        now = self._clock.monotonic()
        for host in self._line.hosts():
            for waiter in self._line.on(host):
                if now >= waiter.wish.deadline:
                    self._line.finish(waiter, failure or waited_in_vain(waiter.wish, waiter.word))


def _facts(grant: Grant) -> dict[str, object]:
    return {
        "lease": grant.id,
        "fencing_number": grant.fencing_number,
        "host": grant.host,
        "holder": grant.holder.name,
        "purpose": grant.purpose,
    }
