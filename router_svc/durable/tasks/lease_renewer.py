"""Renews the leases of one router's claims, detects lost ones, and takes back expired leases of any router."""

import asyncio
from typing import Protocol

import structlog

from router_svc.durable.tasks.config import TaskLimits
from router_svc.durable.tasks.database_clock import DatabaseClock
from router_svc.durable.tasks.store_port import (
    LOST_LEASE,
    Claim,
    ExpiredLease,
    LaneFilled,
    StoreEvent,
    TaskChanged,
    TaskStore,
)
from router_svc.durable.tasks.task_events import wait_for_event
from weft.durable.tasks import TaskFailure, TaskState
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

log = structlog.get_logger("weft.tasks")

MAX_RETRY_SECONDS = 1.0
"""Pause after a failed renewal; a third of the interval where that is less."""
DEBOUNCE_SECONDS = 0.05
"""Events that come within this time cause one renewal."""


class ClaimHolder(Protocol):
    """The engine that runs the claimed tasks."""

    @property
    def claims(self) -> frozenset[Claim]:
        """The claims of the tasks that run here."""
        ...

    def is_claiming(self, task_id: str) -> bool:
        """Whether a claim of the task is in progress."""
        ...

    def lose(self, claim: Claim) -> None:
        """Stops the run whose claim is lost."""
        ...

    def publish(self, event: StoreEvent) -> None:
        """Publishes a change that is written."""
        ...


class LeaseRenewer:
    """Renews all leases three times per lease length."""

    def __init__(
        self, owner: str, store: TaskStore, database_clock: DatabaseClock, limits: TaskLimits, claim_holder: ClaimHolder
    ) -> None:
        self._owner = owner
        self._store = store
        self._database_clock = database_clock
        self._limits = limits
        self._claim_holder = claim_holder
        self._renewal_requested = asyncio.Event()

    def renew_soon(self) -> None:
        """Requests a renewal now, because a task that runs here may have been ended elsewhere."""
        self._renewal_requested.set()

    async def run(self) -> None:
        """Renews leases until cancelled."""
        interval = self._limits.lease_seconds / 3
        while True:
            self._renewal_requested.clear()
            pause = interval
            try:
                await self.renew()
            except WeftError as error:
                log.warning("task leases were not renewed", why=error.message)
                pause = min(MAX_RETRY_SECONDS, interval / 3)
            except Exception:
                # Without renewals every run here loses its lease.
                log.exception("task leases could not be renewed")
                pause = min(MAX_RETRY_SECONDS, interval / 3)
            if await wait_for_event(self._renewal_requested, self._database_clock.clock, pause):
                await self._database_clock.clock.sleep(DEBOUNCE_SECONDS)

    async def renew(self) -> None:
        """Renews this router's leases first, then takes back expired ones. Raises SERVICE_UNAVAILABLE."""
        await self._database_clock.synchronize()
        held = self._claim_holder.claims
        renewed = await self._store.renew(self._owner, self._database_clock.now() + self._limits.lease_seconds)
        for claim in sorted(held - renewed):
            self._claim_holder.lose(claim)
        for claim in sorted(renewed - held - self._claim_holder.claims):
            if not self._claim_holder.is_claiming(claim.task_id):
                await self._revert_unknown(claim)
        await self._revert_expired()

    async def _revert_unknown(self, claim: Claim) -> None:
        """Reverts a claim of this router that has no run, because its acknowledgement was lost."""
        failure = TaskFailure(reason=Reason.LEASE_LOST, message="the acknowledgement of the claim was lost")
        now = self._database_clock.now()
        if await self._store.revert(claim, failure, receipt=b"", counts=False, now=now, ready_at=now):
            log.info(
                "task reverted", task=claim.task_id, attempt=claim.attempt, reason=failure.reason.name, counts=False
            )
            # The claim does not name its lane; the next look at all lanes finds it.
            self._claim_holder.publish(TaskChanged(claim.task_id))

    async def _revert_expired(self) -> None:
        while True:
            lost = await self._store.revert_expired(self._database_clock.now(), self._limits.sweep_batch)
            for lease in lost:
                self._report_expired(lease)
            if len(lost) < self._limits.sweep_batch:
                return

    def _report_expired(self, lease: ExpiredLease) -> None:
        claim = lease.claim
        if lease.state is TaskState.PENDING:
            log.info("task reverted", task=claim.task_id, attempt=claim.attempt, reason=LOST_LEASE.name, counts=True)
        else:
            log.info(
                "task ended",
                task=claim.task_id,
                attempt=claim.attempt,
                state=lease.state.name,
                reason=LOST_LEASE.name,
            )
        self._claim_holder.lose(claim)
        self._claim_holder.publish(TaskChanged(claim.task_id))
        if lease.state is TaskState.PENDING:
            self._claim_holder.publish(LaneFilled(lease.lane))
