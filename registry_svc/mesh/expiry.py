"""What time does: silent runners become inactive, inactive ones are forgotten, heartbeats reach the disk."""

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.domain import EventReason, Kind, Standing
from registry_svc.mesh.policy.events import of_rows
from registry_svc.mesh.policy.liveness import LivenessLimits, Retirement, Verdict, decide_retirement, judge
from registry_svc.mesh.session_state import Member

log = structlog.get_logger("weft.registry")

# A sweep so much later than the one before means that the registry itself was frozen: more than this many intervals,
# and long enough that runners in good health may look silent.
FROZEN_AFTER_INTERVALS = 3
FROZEN_AFTER_SHARE_OF_INACTIVE = 0.5
MAX_LOGGED_NAMES = 10

Row = tuple[Kind, str]
_ORDER = (Kind.AGENT, Kind.MODEL, Kind.RUNNER)


class Expiry:
    """Judges the liveness of all runners, as often as it is asked to."""

    def __init__(self, core: RegistryCore) -> None:
        self._core = core
        self._clock = core.clock
        self._config = core.config
        self._swept_monotonic = core.clock.monotonic()
        self._limits = self._limits_from(self._swept_monotonic)

    def start(self) -> None:
        """The registry is back: from now on runners can be heard. Call it once the core has started."""
        self._swept_monotonic = self._clock.monotonic()
        self._limits = self._limits_from(self._swept_monotonic)

    async def sweep(self) -> None:
        """Expire who was silent too long, forget who was inactive too long, write what is due."""
        self._core.require_open()
        await self._core.writer.run(self._sweep)

    def _limits_from(self, back_since_monotonic: float) -> LivenessLimits:
        return LivenessLimits(
            inactive_after_seconds=self._config.inactive_after_seconds,
            delete_after_seconds=self._config.delete_after_seconds,
            keep_seconds=self._config.hibernating_keep_seconds,
            back_since_monotonic=back_since_monotonic,
            grace_seconds=self._config.restart_grace_seconds,
            spread_seconds=self._config.restart_spread_seconds,
        )

    async def _sweep(self) -> None:
        now = self._clock.monotonic()
        if self._was_frozen(now):
            log.warning("registry was away", seconds=round(now - self._swept_monotonic, 1))
            self._limits = self._limits_from(now)
        self._swept_monotonic = now
        verdicts = [(member, self._judge(member, now)) for member in self._core.mesh]
        self._silence([member for member, verdict in verdicts if verdict is Verdict.SILENCE], now)
        await self._forget([member for member, verdict in verdicts if verdict is Verdict.FORGET])
        await self._save_due_pulses()

    def _judge(self, member: Member, now: float) -> Verdict:
        verdict = judge(member.pulse, self._limits, now, share=member.share)
        if verdict is Verdict.FORGET and self._is_wakeable(member):
            return judge(member.pulse, self._limits, now, share=member.share, wakeable=True)
        return verdict

    def _is_wakeable(self, member: Member) -> bool:
        """Whether the mesh can wake its host for one of its models: then it is not gone, it sleeps."""
        models = (self._core.mesh.model(name) for name in member.publications)
        return any(model and model.manifest.wake and model.manifest.wake.by_mesh for model in models)

    def _was_frozen(self, now: float) -> bool:
        """Stopped, suspended or stuck on the disk: it could hear nobody meanwhile, as if it had been restarted."""
        limit = max(
            FROZEN_AFTER_INTERVALS * self._config.sweep_interval_seconds,
            FROZEN_AFTER_SHARE_OF_INACTIVE * self._config.inactive_after_seconds,
        )
        return now - self._swept_monotonic > limit

    def _silence(self, members: list[Member], now: float) -> None:
        # Memory first: that a runner is gone must be told even while the disk fails. Written with the due pulses.
        if not members:
            return
        now_utc = self._clock.utc_now()
        for member in members:
            member.lose(Standing.SILENT, now, now_utc)
        happenings = [
            happening
            for member in members
            for happening in of_rows(
                member.rows(), EventReason.SILENT, f"the runner {member.profile.name} is not heard of any more"
            )
        ]
        self._core.publish(self._core.mesh.retell(members), happenings)
        log.warning("runners are silent", count=len(members), runners=_some_names(members))

    async def _forget(self, members: list[Member]) -> None:
        if not members:
            return
        await self._core.store.delete_sessions([member.session.id for member in members])
        # All agents before all models: an agent may point to the model of another runner.
        rows = sorted((row for member in members for row in member.rows()), key=lambda row: _ORDER.index(row[0]))
        changes = self._core.mesh.forget(members)
        stays, gone = list[Row](), list[Row]()
        for row in rows:
            (stays if self._core.mesh.is_declared(*row) else gone).append(row)
        log.info("runners forgotten", count=len(members), runners=_some_names(members))
        self._core.publish(
            changes,
            [
                *of_rows(gone, EventReason.EXPIRED, "its runner was away for too long"),
                *of_rows(stays, EventReason.WITHDRAWN, "its runner was away for too long and is forgotten"),
            ],
        )

    async def _save_due_pulses(self) -> None:
        due = [member for member in self._core.mesh if self._is_save_due(member)]
        if due:
            await self._core.store.save_pulses([member.stored_pulse() for member in due])
            for member in due:
                member.saved_pulse = member.pulse

    def _is_save_due(self, member: Member) -> bool:
        saved = member.saved_pulse
        if saved is None or saved.standing is not member.pulse.standing:
            return True
        return member.pulse.heard_monotonic - saved.heard_monotonic >= self._config.heartbeat_save_interval_seconds


def _some_names(members: list[Member]) -> list[str]:
    # Not one line each: ten thousand of them would hold up the loop for longer than all that is told.
    return [member.profile.name for member in members[:MAX_LOGGED_NAMES]]


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
