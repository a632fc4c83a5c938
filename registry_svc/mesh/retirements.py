"""Runners that are taken out of the mesh by the owner of their session: forgotten as soon as that is safe."""

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.domain import EventReason, Kind, Standing
from registry_svc.mesh.policy.events import of_rows
from registry_svc.mesh.policy.retirement import Retirement, decide_retirement
from registry_svc.mesh.session_state import Member

log = structlog.get_logger("weft.registry")

LeaseCount = Callable[[str], int]
"""By a runner's name: how many leases of accelerator memory it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retired:
    """What became of a runner that was to be retired."""

    outcome: Retirement
    models: tuple[str, ...] = ()
    """The models that are gone from the mesh; declared ones stay."""
    pools: tuple[str, ...] = ()
    """The pools that have no member any more."""


class Retirements:
    """Forgets retired runners at once, or with a later sweep when they are gone and their memory is free."""

    def __init__(self, core: RegistryCore, lease_count: LeaseCount) -> None:
        self._core = core
        self._lease_count = lease_count
        self._waiting: set[tuple[str, str]] = set()
        """Sessions that cannot be forgotten yet, each with its incarnation: one that opens again is no longer meant.

        At most as many as there are sessions.
        """

    async def retire(self, session_id: str, *, process_ended: bool) -> Retired:
        """Take a runner out of the mesh; see RunnerSessionService.RetireSession."""
        return await self._core.write(lambda: self._retire(session_id, process_ended=process_ended))

    async def sweep(self) -> None:
        """Forget those that could not be forgotten before and can be now."""
        if self._waiting:
            self._core.require_open()
            await self._core.writer.run(self._sweep)

    async def _retire(self, session_id: str, *, process_ended: bool) -> Retired:
        member = self._core.mesh.of_session(session_id)
        if member is None:
            return Retired(outcome=Retirement.UNKNOWN)
        outcome = self._decide(member, process_ended=process_ended)
        if outcome is Retirement.RETIRED:
            return await self._forget(member)
        self._waiting.add((session_id, member.session.incarnation))
        if outcome is Retirement.HOLDS_MEMORY and member.pulse.active:
            self._lose(member)
        log.info("runner is retired later", runner=member.profile.name, outcome=outcome.name)
        return Retired(outcome=outcome)

    async def _sweep(self) -> None:
        for session_id, incarnation in sorted(self._waiting):
            member = self._core.mesh.of_session(session_id)
            if member is None or member.session.incarnation != incarnation:
                self._waiting.discard((session_id, incarnation))
            elif self._decide(member, process_ended=False) is Retirement.RETIRED:
                await self._forget(member)
                self._waiting.discard((session_id, incarnation))

    def _decide(self, member: Member, *, process_ended: bool) -> Retirement:
        return decide_retirement(
            standing=member.pulse.standing,
            reported=member.reported,
            process_ended=process_ended,
            lease_count=self._lease_count(member.profile.name),
        )

    async def _forget(self, member: Member) -> Retired:
        mesh = self._core.mesh
        names = [name for name in member.publications if not mesh.is_declared(Kind.MODEL, name)]
        pools = {pool for name in names if (pool := mesh.pools.pool_of(name)) is not None}
        rows = [row for row in member.rows() if not mesh.is_declared(*row)]
        await self._core.store.delete_sessions([member.session.id])
        changes = mesh.forget([member])
        self._core.publish(changes, of_rows(rows, EventReason.WITHDRAWN, "its runner was retired"))
        log.info("runner retired", runner=member.profile.name, models=len(names))
        gone = tuple(sorted(pool for pool in pools if mesh.pool(pool) is None))
        return Retired(outcome=Retirement.RETIRED, models=tuple(sorted(names)), pools=gone)

    def _lose(self, member: Member) -> None:
        """It is inactive from now on; written with the pulses that are due."""
        member.lose(Standing.CLOSED, self._core.clock.monotonic(), self._core.clock.utc_now())
        said = of_rows(member.rows(), EventReason.CLOSED, f"the process of the runner {member.profile.name} has ended")
        self._core.publish(self._core.mesh.retell([member]), said)
