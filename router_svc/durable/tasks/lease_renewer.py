"""Keeps the claims of one router alive, notices which it has lost, and takes back those of routers that are gone."""

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
"""Pause after a beat that the database did not take; a third of the interval where that is less."""
HURRY_SECONDS = 0.05
"""News that comes within this is looked at together."""


class ClaimHolder(Protocol):
    """Who runs what is claimed."""

    @property
    def claims(self) -> frozenset[Claim]:
        """What runs here."""
        ...

    def is_claiming(self, task_id: str) -> bool:
        """Whether a claim of it is under way."""
        ...

    def lose(self, claim: Claim) -> None:
        """End what runs under a claim that is lost."""
        ...

    def publish(self, event: StoreEvent) -> None:
        """Tell what was written."""
        ...


class LeaseRenewer:
    """Beats three times in each lease."""

    def __init__(
        self, owner: str, store: TaskStore, database_clock: DatabaseClock, limits: TaskLimits, claimant: ClaimHolder
    ) -> None:
        self._owner = owner
        self._store = store
        self._database_clock = database_clock
        self._limits = limits
        self._claimant = claimant
        self._hurry = asyncio.Event()

    def renew_soon(self) -> None:
        """Somebody may have ended what runs here."""
        self._hurry.set()

    async def run(self) -> None:
        """Beat until cancelled."""
        interval = self._limits.lease_seconds / 3
        while True:
            self._hurry.clear()
            pause = interval
            try:
                await self.beat()
            except WeftError as error:
                log.warning("task leases were not renewed", why=error.message)
                pause = min(MAX_RETRY_SECONDS, interval / 3)
            except Exception:
                # A heart that stands still loses everything that runs here.
                log.exception("task leases could not be looked at")
                pause = min(MAX_RETRY_SECONDS, interval / 3)
            if await wait_for_event(self._hurry, self._database_clock.clock, pause):
                await self._database_clock.clock.sleep(HURRY_SECONDS)

    async def beat(self) -> None:
        """Prolong what runs here first, and only then look for what others have left. Raises SERVICE_UNAVAILABLE."""
        await self._database_clock.correct()
        held = self._claimant.claims
        renewed = await self._store.renew(self._owner, self._database_clock.now() + self._limits.lease_seconds)
        for claim in sorted(held - renewed):
            self._claimant.lose(claim)
        for claim in sorted(renewed - held - self._claimant.claims):
            if not self._claimant.is_claiming(claim.task_id):
                await self._give_back(claim)
        await self._take_back()

    async def _give_back(self, claim: Claim) -> None:
        """A claim of this router that nothing runs under: its acknowledgement was lost on the way."""
        failure = TaskFailure(reason=Reason.LEASE_LOST, message="the claim was not heard of")
        now = self._database_clock.now()
        if await self._store.revert(claim, failure, receipt=b"", counts=False, now=now, ready_at=now):
            log.info(
                "task reverted", task=claim.task_id, attempt=claim.attempt, reason=failure.reason.name, counts=False
            )
            # Its lane is found by the next look: the claim does not say which it is.
            self._claimant.publish(TaskChanged(claim.task_id))

    async def _take_back(self) -> None:
        while True:
            lost = await self._store.revert_expired(self._database_clock.now(), self._limits.sweep_batch)
            for lease in lost:
                self._tell(lease)
            if len(lost) < self._limits.sweep_batch:
                return

    def _tell(self, lease: ExpiredLease) -> None:
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
        self._claimant.lose(claim)
        self._claimant.publish(TaskChanged(claim.task_id))
        if lease.state is TaskState.PENDING:
            self._claimant.publish(LaneFilled(lease.lane))
