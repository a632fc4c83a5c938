"""The registry's state and its only writer: asks policy, commits to the store, changes memory, tells the watchers."""

import heapq
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta

import structlog

from registry_svc.config import RegistryConfig
from registry_svc.domain import (
    Change,
    Heartbeat,
    Model,
    Opening,
    Publication,
    Revised,
    Runner,
    RunnerChanged,
    Session,
    Snapshot,
    Standing,
)
from registry_svc.mesh import Member, Mesh
from registry_svc.policy.liveness import LivenessLimits, Pulse, Verdict, heard, judge, lost, resumed
from registry_svc.policy.sessions import (
    Admitted,
    Hearing,
    Repeated,
    decide_hearing,
    decide_opening,
    unknown_session,
)
from registry_svc.store.port import Store, StoredPulse, StoredSession
from registry_svc.watch import Broadcaster, Watcher
from registry_svc.writer import SingleWriter
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.ids import new_id, new_key
from weft.kernel.reasons import Reason

log = structlog.get_logger("weft.registry")

# A sweep so much later than the one before means that the registry itself was frozen: more than this many intervals,
# and long enough that runners in good health may look silent.
FROZEN_AFTER_INTERVALS = 3
FROZEN_AFTER_SHARE_OF_INACTIVE = 0.5


class Roster:
    """Who is in the mesh. Reads answer from memory at once; writes pass one by one.

    What is acknowledged is on disk, except heartbeats: their times are written by `sweep`, now and then.
    """

    def __init__(self, store: Store, clock: Clock, config: RegistryConfig) -> None:
        self._store = store
        self._clock = clock
        self._config = config
        self._mesh = Mesh()
        self._writer = SingleWriter()
        self._broadcaster = Broadcaster(config.watch_buffer_responses)
        self._limits: LivenessLimits | None = None
        self._swept_monotonic = 0.0
        # A watcher that has seen nothing yet counts from zero, so a snapshot is never at revision zero.
        self._revision = 1

    async def start(self) -> None:
        """Take over the store and read it back; raises ALREADY_EXISTS when another registry owns it."""
        await self._store.open()
        try:
            for stored in await self._store.load():
                self._mesh.install(self._read_back(stored))
        except BaseException:
            await self._store.close()
            raise
        self._swept_monotonic = self._clock.monotonic()
        self._limits = self._limits_with_grace()
        log.info("registry open", runners=len(self._mesh))

    async def stop(self, grace_seconds: float) -> None:
        """End the watchers, finish what is being written for at most `grace_seconds`, and close the store."""
        self._broadcaster.close()
        if self._limits is not None:
            self._limits = None
            await self._writer.drain(grace_seconds)
            # Times of heartbeats are a convenience; failing to write the last ones is no reason to fail to stop.
            with suppress(WeftError):
                await self._store.save_pulses([self._stored_pulse(member) for member in self._mesh])
            self._mesh = Mesh()
            await self._store.close()

    def runner(self, name: str) -> Runner | None:
        """The runner of this name."""
        self._require_open()
        member = self._mesh.of_runner(name)
        return None if member is None else member.runner()

    def model(self, name: str) -> Model | None:
        """The model of this name."""
        self._require_open()
        return self._mesh.model(name)

    def runners_after(self, name: str, limit: int) -> list[Runner]:
        """At most `limit` runners whose names come after `name`, in order."""
        self._require_open()
        found = (self._mesh.of_runner(each) for each in _first_after(self._mesh.runner_names(), name, limit))
        return [member.runner() for member in found if member is not None]

    def models_after(self, name: str, limit: int) -> list[Model]:
        """At most `limit` models whose names come after `name`, in order."""
        self._require_open()
        found = (self._mesh.model(each) for each in _first_after(self._mesh.model_names(), name, limit))
        return [model for model in found if model is not None]

    def watch(self) -> tuple[Snapshot, Watcher]:
        """Everything there is, and a watcher that hears every change after exactly that."""
        self._require_open()
        snapshot = Snapshot(
            self._revision,
            tuple(member.runner() for member in self._mesh),
            tuple(model for member in self._mesh for model in member.models()),
        )
        return snapshot, self._broadcaster.subscribe()

    async def open_session(self, opening: Opening) -> Session:
        """Publish a runner and its models; see RunnerSessionService.OpenSession."""
        self._require_open()
        return await self._writer.run(lambda: self._open(opening))

    async def hear(self, beat: Heartbeat) -> None:
        """Take in a heartbeat; raises SESSION_UNKNOWN or STALE_HEARTBEAT."""
        async with self._writer.turn():
            self._require_open()
            member = self._mesh.of_session(beat.session_id)
            if member is None:
                raise unknown_session()
            hearing = decide_hearing(beat, member.session, member.pulse.standing, member.sequence)
            self._revive(member, beat, hearing)

    async def close_session(self, session_id: str, incarnation: str) -> None:
        """Make a runner inactive at its own wish; a session or incarnation that is gone already is passed over."""
        self._require_open()
        await self._writer.run(lambda: self._close(session_id, incarnation))

    async def sweep(self) -> None:
        """Expire who was silent too long, forget who was inactive too long, write what is due."""
        self._require_open()
        await self._writer.run(self._sweep)

    def _require_open(self) -> LivenessLimits:
        if self._limits is None:
            raise WeftError(Reason.SHUTTING_DOWN, "the registry is not running", retry_after_seconds=1.0)
        return self._limits

    def _limits_with_grace(self) -> LivenessLimits:
        return LivenessLimits(
            inactive_after_seconds=self._config.inactive_after_seconds,
            delete_after_seconds=self._config.delete_after_seconds,
            grace_until_monotonic=self._clock.monotonic() + self._config.restart_grace_seconds,
        )

    async def _open(self, opening: Opening) -> Session:
        own, named = self._mesh.of_session(opening.session_id), self._mesh.of_runner(opening.profile.name)
        decision = decide_opening(
            opening,
            own=None if own is None else own.as_holder(),
            runner_holder=None if named is None else named.as_holder(),
            model_holders=self._mesh.model_holders(manifest.name for manifest in opening.models),
        )
        if isinstance(decision, Repeated):
            return decision.session
        if own is None and named is None and len(self._mesh) >= self._config.max_runners:
            raise WeftError(Reason.NO_SLOT_AVAILABLE, f"the mesh already has {self._config.max_runners} runners")
        member = self._new_member(opening, decision)
        evicted = [] if decision.evicted is None else [decision.evicted.id]
        await self._store.save_session(self._stored_session(member), evicted=evicted)
        member.saved_pulse = member.pulse
        self._publish(self._mesh.install(member, evicted))
        log.info("session opened", runner=opening.profile.name, models=len(opening.models), adopted=own is not None)
        return member.session

    def _new_member(self, opening: Opening, decision: Admitted) -> Member:
        now = self._clock.utc_now()
        runner = opening.profile.name
        session = Session(
            id=new_id("ses") if decision.adopted is None else decision.adopted.id,
            request_id=opening.request_id,
            runner=runner,
            incarnation=opening.profile.incarnation,
            ticket_key=new_key(),
        )
        publications: dict[str, Publication] = {}
        for manifest in opening.models:
            earlier = self._mesh.model(manifest.name)
            created_at = now if earlier is None else earlier.publication.created_at
            publications[manifest.name] = Publication(manifest=manifest, runner=runner, created_at=created_at)
        return Member(
            session=session,
            profile=opening.profile,
            pulse=heard(self._clock.monotonic()),
            last_heartbeat_at=now,
            capability=opening.capability,
            publications=publications,
        )

    def _revive(self, member: Member, beat: Heartbeat, hearing: Hearing) -> None:
        was_active, old_capability = member.pulse.active, member.capability
        member.pulse = heard(self._clock.monotonic())
        member.last_heartbeat_at = self._clock.utc_now()
        if hearing is Hearing.FRESH:
            member.sequence = beat.sequence
            if beat.capability is not None:
                member.capability = beat.capability
        if not was_active:
            log.info("runner is back", runner=member.profile.name)
            self._publish(member.all_changed())
        elif member.capability != old_capability:
            self._publish([RunnerChanged(member.runner())])

    async def _close(self, session_id: str, incarnation: str) -> None:
        member = self._mesh.of_session(session_id)
        if member is None or member.session.incarnation != incarnation or member.pulse.standing is Standing.CLOSED:
            return
        was_active = member.pulse.active
        closed = lost(member.pulse, Standing.CLOSED, self._clock.monotonic())
        await self._store.save_pulses([self._stored_pulse(member, closed)])
        member.pulse = member.saved_pulse = closed
        log.info("session closed", runner=member.profile.name)
        if was_active:
            self._publish(member.all_changed())

    async def _sweep(self) -> None:
        limits, now = self._require_open(), self._clock.monotonic()
        if self._was_frozen(now):
            log.warning("registry was away", seconds=round(now - self._swept_monotonic, 1))
            limits = self._limits = self._limits_with_grace()
        self._swept_monotonic = now
        verdicts = [(member, judge(member.pulse, limits, now)) for member in self._mesh]
        self._silence([member for member, verdict in verdicts if verdict is Verdict.SILENCE], now)
        await self._forget([member for member, verdict in verdicts if verdict is Verdict.FORGET])
        await self._save_due_pulses()

    def _was_frozen(self, now: float) -> bool:
        """Stopped, suspended or stuck on the disk: it could hear nobody meanwhile, as if it had been restarted."""
        limit = max(
            FROZEN_AFTER_INTERVALS * self._config.sweep_interval_seconds,
            FROZEN_AFTER_SHARE_OF_INACTIVE * self._config.inactive_after_seconds,
        )
        return now - self._swept_monotonic > limit

    def _silence(self, members: list[Member], now: float) -> None:
        # Memory first: that a runner is gone must be told even while the disk fails. Written with the due pulses.
        changes: list[Change] = []
        for member in members:
            member.pulse = lost(member.pulse, Standing.SILENT, now)
            log.warning("runner is silent", runner=member.profile.name)
            changes += member.all_changed()
        self._publish(changes)

    async def _forget(self, members: list[Member]) -> None:
        if not members:
            return
        await self._store.delete_sessions([member.session.id for member in members])
        changes: list[Change] = []
        for member in members:
            log.info("runner forgotten", runner=member.profile.name)
            changes += self._mesh.forget(member)
        self._publish(changes)

    async def _save_due_pulses(self) -> None:
        due = [member for member in self._mesh if self._is_save_due(member)]
        if due:
            await self._store.save_pulses([self._stored_pulse(member) for member in due])
            for member in due:
                member.saved_pulse = member.pulse

    def _is_save_due(self, member: Member) -> bool:
        saved = member.saved_pulse
        if saved is None or saved.standing is not member.pulse.standing:
            return True
        return member.pulse.heard_monotonic - saved.heard_monotonic >= self._config.heartbeat_save_interval_seconds

    def _publish(self, changes: Iterable[Change]) -> None:
        batch: list[Revised] = []
        for change in changes:
            self._revision += 1
            batch.append(Revised(self._revision, change))
        if batch:
            self._broadcaster.publish(batch)

    def _stored_session(self, member: Member) -> StoredSession:
        return StoredSession(
            session=member.session,
            profile=member.profile,
            pulse=self._stored_pulse(member),
            publications=tuple(member.publications.values()),
        )

    def _stored_pulse(self, member: Member, pulse: Pulse | None = None) -> StoredPulse:
        pulse = pulse or member.pulse
        inactive_since = None
        if pulse.lost_monotonic is not None:
            lost_ago = timedelta(seconds=self._clock.monotonic() - pulse.lost_monotonic)
            inactive_since = self._clock.utc_now() - lost_ago
        return StoredPulse(
            runner=member.profile.name,
            standing=pulse.standing,
            last_heartbeat_at=member.last_heartbeat_at,
            inactive_since=inactive_since,
        )

    def _read_back(self, stored: StoredSession) -> Member:
        now_utc, pulse = self._clock.utc_now(), stored.pulse
        lost_ago = None if pulse.inactive_since is None else (now_utc - pulse.inactive_since).total_seconds()
        heard_ago = (now_utc - pulse.last_heartbeat_at).total_seconds()
        resumed_pulse = resumed(pulse.standing, heard_ago, lost_ago, self._clock.monotonic())
        return Member(
            session=stored.session,
            profile=stored.profile,
            pulse=resumed_pulse,
            last_heartbeat_at=pulse.last_heartbeat_at,
            publications={each.manifest.name: each for each in stored.publications},
            saved_pulse=resumed_pulse,
        )


def _first_after(names: Iterable[str], after: str, limit: int) -> list[str]:
    return heapq.nsmallest(limit, (name for name in names if name > after))
