"""Steps of the ledger: end leases, grant freed memory to the wait queue, and ask runners to evict idle models.

Steps do not wait for answers to eviction requests: the policy uses the state of each attempt.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from registry_svc.ledger.lease_store import LeaseStore
from registry_svc.ledger.lease_table import LeaseTable
from registry_svc.ledger.policy.leases import (
    Grant,
    Lease,
    LeaseState,
    MemoryRequest,
    Shares,
    is_forgotten,
    is_orphaned,
    is_over,
    orphaned,
    released,
)
from registry_svc.ledger.policy.reclaim import (
    REFUSAL_KEPT_SECONDS,
    EvictionAttempt,
    EvictionState,
    QueuePlan,
    Reclaim,
    plan_queue,
)
from registry_svc.ledger.wait_queue import WaitQueue, wait_status, wait_timeout
from registry_svc.mesh.runner_calls import EvictionAnswer, EvictionRequest, RunnerCalls
from registry_svc.registry_config import LedgerConfig
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.services.service_lifecycle import start_task, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock

if TYPE_CHECKING:
    import asyncio


log = get_logger("weft.registry.ledger")

LEASE_ID_BYTES = 16
HEARD_WITHIN_SECONDS = 1.0
"""A disconnected caller that received its lease renews within this time; one that did not receive it never renews."""


EVICTION_LIMIT_SECONDS = 60.0
"""Timeout of an eviction request. A runner answers once the model sleeps, and a backend may take time to stop."""


class Evictor:
    """Sends eviction requests, and keeps the state of each attempt by lease. Calls `wake` after every answer."""

    def __init__(self, calls: RunnerCalls, clock: Clock, wake: Callable[[], None]) -> None:
        self._calls = calls
        self._clock = clock
        self._wake = wake
        self._attempts: dict[str, EvictionAttempt] = {}
        self.answers = dict.fromkeys(EvictionAnswer, 0)
        """Number of each answer since the start."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def attempts(self) -> Mapping[str, EvictionAttempt]:
        """Returns attempts that are pending or were answered recently, by lease id."""
        return dict(self._attempts)

    def evict(self, lease: Lease, wanted: MemoryRequest) -> None:
        """Starts to evict the model of `lease` for `wanted`, unless that is in progress."""
        lease_id = lease.grant.id
        if lease_id in self._tasks:
            return
        self._attempts[lease_id] = EvictionAttempt(
            lease_id=lease_id, state=EvictionState.PENDING, at=self._clock.monotonic()
        )
        request = EvictionRequest(
            runner=lease.grant.holder.name,
            model=lease.grant.purpose,
            lease_id=lease_id,
            priority=wanted.priority,
            wanted_by=wanted.purpose,
        )
        self._tasks[lease_id] = start_task(self._send(request), name="ledger-evict")

    def sweep(self, wait_seconds: float) -> None:
        """Cancels requests that take too long, and forgets answers that no longer matter."""
        now = self._clock.monotonic()
        for attempt in self.attempts().values():
            if attempt.state is not EvictionState.PENDING and now - attempt.at >= REFUSAL_KEPT_SECONDS + wait_seconds:
                del self._attempts[attempt.lease_id]
            elif attempt.state is EvictionState.PENDING and now - attempt.at >= EVICTION_LIMIT_SECONDS:
                self._tasks[attempt.lease_id].cancel()

    async def stop(self) -> None:
        """Cancels all requests. Idempotent."""
        tasks, self._tasks = list(self._tasks.values()), {}
        await stop_tasks(tasks)
        self._attempts.clear()

    async def _send(self, request: EvictionRequest) -> None:
        answer = EvictionAnswer.UNREACHABLE
        try:
            answer = await self._calls.evict(request)
        finally:
            # Also after a cancellation: do not ask a runner that did not answer again immediately.
            self._record(request, answer)
        log.info(
            "eviction requested",
            runner=request.runner,
            model=request.model,
            lease=request.lease_id,
            wanted_by=request.wanted_by,
            answer=answer.name.lower(),
        )

    def _record(self, request: EvictionRequest, answer: EvictionAnswer) -> None:
        self._tasks.pop(request.lease_id, None)
        self.answers[answer] += 1
        attempt = self._attempts.get(request.lease_id)
        if attempt is not None:
            state = EvictionState.GIVEN_UP if answer is EvictionAnswer.GIVEN_UP else EvictionState.REFUSED
            self._attempts[request.lease_id] = replace(attempt, state=state, at=self._clock.monotonic())
        self._wake()


class Reconciler:
    """Adds and removes leases. Callers must run in the writer's turn."""

    def __init__(
        self,
        account: LeaseTable,
        queue: WaitQueue,
        evictor: Evictor,
        store: LeaseStore,
        clock: Clock,
        config: LedgerConfig,
    ) -> None:
        self._table = account
        self._queue = queue
        self._evictor = evictor
        self._store = store
        self._clock = clock
        self._config = config
        self._last_fencing_number = 0
        self._grace_until = 0.0
        self._ending: frozenset[str] = frozenset()
        """Leases with a deletion in progress."""
        self._abandoned: dict[str, float] = {}
        """Leases of disconnected callers, and when to release them, in monotonic seconds."""
        self._unacknowledged: dict[str, object] = {}
        """Leases that were never renewed, and the last call that received them."""

    def begin(self, last_fencing_number: int) -> None:
        """Starts with the stored fencing number and a grace period without orphaned leases."""
        self._last_fencing_number = last_fencing_number
        self.extend_grace()

    def extend_grace(self) -> None:
        """Starts the grace period, because no holder could reach the registry until now."""
        self._grace_until = self._clock.monotonic() + self._config.restart_grace_seconds

    def set_recipient(self, lease: Lease, caller: object) -> None:
        """Records which call receives a lease that was never renewed, which is thus no longer abandoned."""
        if lease.grant.id in self._unacknowledged:
            self._unacknowledged[lease.grant.id] = caller
            self._abandoned.pop(lease.grant.id, None)

    def acknowledge(self, lease_id: str) -> None:
        """Records that a lease was renewed, so its holder has received it."""
        self._unacknowledged.pop(lease_id, None)

    def is_ending(self, lease_id: str) -> bool:
        """Whether a lease is being deleted, so that a renewal is too late."""
        return lease_id in self._ending

    def is_one_at_its_end(self, leases: Iterable[Lease]) -> bool:
        """Whether a step would end one of these leases now."""
        now = self._clock.monotonic()
        return any(self._is_at_its_end(lease, now) for lease in leases)

    def abandon(self, lease: Lease, caller: object, *, may_have_received: bool) -> None:
        """Releases the lease of a disconnected caller, unless another call received it or it is renewed first."""
        if self._unacknowledged.get(lease.grant.id) is caller:
            patience = HEARD_WITHIN_SECONDS if may_have_received else 0.0
            self._abandoned[lease.grant.id] = self._clock.monotonic() + patience

    async def reconcile(self) -> None:
        """Runs one step. Raises SERVICE_UNAVAILABLE if the store fails; the next step repeats the rest."""
        now = self._clock.monotonic()
        self._orphan(now)
        await self._give_up_abandoned()
        await self._end(now)
        for host in self._queue.hosts():
            await self._serve(host)
        self._evictor.sweep(self._config.reclaim_wait_seconds)
        self._table.forget_hosts(now)
        self.end_waits()

    async def release(self, leases: Sequence[Lease]) -> None:
        """Releases leases, first in the store, then in memory."""
        if not leases:
            return
        await self._store.save_releasing([lease.grant.id for lease in leases])
        now = self._clock.monotonic()
        for lease in leases:
            # Keep changes that were recorded during the write.
            current = self._table.lease(lease.grant.id)
            if current is not None and current.state is not LeaseState.RELEASING:
                self._table.put(released(current, now))
            self._unacknowledged.pop(lease.grant.id, None)

    def _orphan(self, now: float) -> None:
        for lease in self._table:
            if is_orphaned(lease, now, self._config.lease_time_to_live_seconds, self._grace_until):
                self._table.put(orphaned(lease, now))
                log.warning("lease orphaned", **_facts(lease.grant))

    async def _give_up_abandoned(self) -> None:
        now = self._clock.monotonic()
        given_up = [lease_id for lease_id, at in self._abandoned.items() if now >= at]
        leases = [lease for lease_id in given_up if (lease := self._table.lease(lease_id)) is not None]
        # The holder has received a lease that was renewed meanwhile.
        await self.release([lease for lease in leases if lease.grant.id in self._unacknowledged])
        for lease_id in given_up:
            self._abandoned.pop(lease_id, None)

    async def _end(self, now: float) -> None:
        over = [lease for lease in self._table if self._is_at_its_end(lease, now)]
        if not over:
            return
        self._ending = frozenset(lease.grant.id for lease in over)
        try:
            await self._store.remove(sorted(self._ending))
        finally:
            self._ending = frozenset()
        for lease in over:
            self._table.drop(lease)
            self._unacknowledged.pop(lease.grant.id, None)
            log.info("lease ended", **_facts(lease.grant))

    def _is_at_its_end(self, lease: Lease, now: float) -> bool:
        if lease.since is None:
            return False
        host = self._table.host(lease.grant.host)
        if host is not None and is_over(lease, host.snapshot, host.seen, self._config.renew_interval_seconds):
            return True
        return is_forgotten(lease, now, 0.0 if host is None else host.seen, self._config.orphan_keep_seconds)

    async def _serve(self, host: str) -> None:
        while (plan := self._plan(host)) is not None and plan.grants:
            # Grant one at a time, and plan again after changes during each write.
            await self._grant(*plan.grants[0])
        if plan is None:
            return
        for request, lease in plan.evictions:
            self._evictor.evict(lease, request)
        self._tell(host)

    def _plan(self, host: str) -> QueuePlan | None:
        account, seen = self._table.open(host), self._table.host(host)
        if account is None or seen is None:
            return None
        reclaim = Reclaim(
            attempts=self._evictor.attempts(),
            wait_seconds=self._config.reclaim_wait_seconds,
            look_seconds=self._config.renew_interval_seconds,
            seen=seen.seen,
            now=self._clock.monotonic(),
        )
        return plan_queue(
            account, self._table.leases_on(host), [each.request for each in self._queue.on(host)], reclaim
        )

    async def _grant(self, request: MemoryRequest, shares: Shares) -> None:
        self._last_fencing_number += 1
        grant = Grant(
            id=f"lease-{secrets.token_hex(LEASE_ID_BYTES)}",
            fencing_number=self._last_fencing_number,
            request_id=request.request_id,
            host=request.host,
            holder=request.holder,
            purpose=request.purpose,
            shares=shares,
            pinned=request.pinned,
            priority=request.priority,
            created_at=self._clock.utc_now(),
        )
        try:
            await self._store.grant(grant)
        except WeftError as error:
            self._refuse(request, error)
            raise
        lease = Lease(
            grant=grant,
            state=LeaseState.HELD,
            renewed=self._clock.monotonic(),
            priority=request.priority,
            pinned=request.pinned,
        )
        self._table.put(lease)
        log.info("lease granted", **_facts(grant), shares=shares)
        waiter = self._queue.find(request.host, request.key)
        self._unacknowledged[grant.id] = waiter
        if waiter is None:
            self._abandoned[grant.id] = self._clock.monotonic()
            await self._give_up_abandoned()
        else:
            self._queue.finish(waiter, lease)

    def _refuse(self, request: MemoryRequest, error: WeftError) -> None:
        waiter = self._queue.find(request.host, request.key)
        if waiter is not None:
            self._queue.finish(waiter, error)

    def _tell(self, host: str) -> None:
        account = self._table.open(host)
        if account is None:
            return
        leases = self._table.leases_on(host)
        for ahead, waiter in enumerate(sorted(self._queue.on(host), key=lambda each: each.request.queue_key)):
            self._queue.show(waiter, wait_status(waiter.request, account, leases, ahead))

    def end_waits(self, failure: WeftError | None = None) -> None:
        """Ends waits after their deadline, with `failure` if that is the cause."""
        now = self._clock.monotonic()
        for host in self._queue.hosts():
            for waiter in self._queue.on(host):
                if now >= waiter.request.deadline:
                    self._queue.finish(waiter, failure or wait_timeout(waiter.request, waiter.status))


def _facts(grant: Grant) -> dict[str, object]:
    return {
        "lease": grant.id,
        "fencing_number": grant.fencing_number,
        "host": grant.host,
        "holder": grant.holder.name,
        "purpose": grant.purpose,
    }
