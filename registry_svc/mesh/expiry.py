"""Expiry: silent runners become inactive, inactive and retired ones are deleted; heartbeats and events are stored."""

from collections.abc import Callable

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.events import events_for
from registry_svc.mesh.policy.heartbeat import Retirement, Verdict, decide_retirement, judge
from registry_svc.mesh.session_state import SessionState
from registry_svc.mesh.states import Standing
from weft.api.registry.v1 import event_pb2
from weft.api.registry.v1.runner_session_service_pb2 import RetireSessionResponse
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.telemetry.log import get_logger

log = get_logger("weft.registry")

# A sweep that is more than this many intervals late, and late enough for healthy runners to look silent, means that
# the registry was frozen.
FROZEN_AFTER_INTERVALS = 3
FROZEN_AFTER_SHARE_OF_INACTIVE = 0.5
MAX_LOGGED_NAMES = 10

Row = tuple[ResourceKind, str]
_ORDER = (ResourceKind.AGENT, ResourceKind.MODEL, ResourceKind.RUNNER)


class Expiry:
    """Checks the liveness of all runners at every sweep."""

    def __init__(self, core: RegistryCore) -> None:
        self._core = core
        self._clock = core.clock
        self._config = core.config
        self._swept_monotonic = self._back_since = core.clock.monotonic()

    def start(self) -> None:
        """Starts the grace period of a start. Call it once the core has started."""
        self._swept_monotonic = self._back_since = self._clock.monotonic()

    async def sweep(self) -> None:
        """Expires silent runners, deletes those inactive too long, and stores events and due heartbeat times."""
        self._core.require_open()
        async with self._core.writer.turn():
            self._silence_all()
        await self._core.writer.run(self._sweep)

    def _silence_all(self) -> None:
        now = self._clock.monotonic()
        if self._was_frozen(now):
            log.warning("registry was suspended", seconds=round(now - self._swept_monotonic, 1))
            self._back_since = now
        self._swept_monotonic = now
        self._silence(self._judged(Verdict.SILENCE, now), now)

    async def _sweep(self) -> None:
        await self._forget(self._judged(Verdict.FORGET, self._clock.monotonic()))
        await self._save_due_pulses()
        await self._core.events.save(self._core.store.save_events)

    def _judged(self, verdict: Verdict, now: float) -> list[SessionState]:
        return [state for state in self._core.mesh if self._judge(state, now) is verdict]

    def _judge(self, state: SessionState, now: float) -> Verdict:
        verdict = judge(state.pulse, self._config, self._back_since, now, share=state.share)
        if verdict is Verdict.FORGET and self._is_wakeable(state):
            return judge(state.pulse, self._config, self._back_since, now, share=state.share, wakeable=True)
        return verdict

    def _is_wakeable(self, state: SessionState) -> bool:
        """Whether the mesh can wake its host for one of its models, so that it is asleep and not gone."""
        models = (self._core.mesh.model(name) for name in state.publications)
        return any(model is not None and model.manifest.wake.HasField("by_mesh") for model in models)

    def _was_frozen(self, now: float) -> bool:
        """Whether the process was suspended or stuck, so that it received no heartbeats."""
        limit = max(
            FROZEN_AFTER_INTERVALS * self._config.sweep_interval_seconds,
            FROZEN_AFTER_SHARE_OF_INACTIVE * self._config.inactive_after_seconds,
        )
        return now - self._swept_monotonic > limit

    def _silence(self, members: list[SessionState], now: float) -> None:
        # Memory first: watchers must learn that a runner is gone even if the disk fails. Stored with due pulses.
        if not members:
            return
        now_utc = self._clock.utc_now()
        for state in members:
            state.lose(Standing.SILENT, now, now_utc)
        drafts = [
            draft
            for state in members
            for draft in events_for(
                state.rows(),
                event_pb2.EVENT_REASON_SILENT,
                f"the runner {state.profile.name} stopped sending heartbeats",
            )
        ]
        self._core.publish(self._core.mesh.changes_for(members), drafts)
        log.warning("runners are silent", count=len(members), runners=_some_names(members))

    async def _forget(self, members: list[SessionState]) -> None:
        if not members:
            return
        await self._core.store.delete_sessions([state.session.id for state in members])
        # Agents before models: an agent may point to a model of another runner.
        rows = sorted((row for state in members for row in state.rows()), key=lambda row: _ORDER.index(row[0]))
        changes = self._core.mesh.forget(members)
        stays, gone = list[Row](), list[Row]()
        for row in rows:
            (stays if self._core.mesh.is_declared(*row) else gone).append(row)
        log.info("runners forgotten", count=len(members), runners=_some_names(members))
        self._core.publish(
            changes,
            [
                *events_for(gone, event_pb2.EVENT_REASON_EXPIRED, "its runner was offline for too long"),
                *events_for(
                    stays, event_pb2.EVENT_REASON_WITHDRAWN, "its runner was offline for too long and was removed"
                ),
            ],
        )

    async def _save_due_pulses(self) -> None:
        due = [state for state in self._core.mesh if self._is_save_due(state)]
        if due:
            await self._core.store.save_pulses([state.stored_pulse() for state in due])
            for state in due:
                state.saved_pulse = state.pulse

    def _is_save_due(self, state: SessionState) -> bool:
        saved = state.saved_pulse
        if saved is None or saved.standing is not state.pulse.standing:
            return True
        return state.pulse.alive_monotonic - saved.alive_monotonic >= self._config.heartbeat_save_interval_seconds


def _some_names(members: list[SessionState]) -> list[str]:
    # One log line for all: ten thousand lines would block the loop longer than publishing the changes.
    return [state.profile.name for state in members[:MAX_LOGGED_NAMES]]


LeaseCount = Callable[[str], int]
"""Returns the number of a runner's leases of accelerator memory, by its name."""


class Retirements:
    """Deletes retired runners immediately, or in a later sweep once they are gone and their memory is free."""

    def __init__(self, core: RegistryCore, lease_count: LeaseCount) -> None:
        self._core = core
        self._lease_count = lease_count
        self._waiting: set[tuple[str, str]] = set()
        """Sessions that cannot be deleted yet, with their incarnations: a reopened session is no longer meant."""

    async def retire(self, session_id: str, *, process_ended: bool) -> RetireSessionResponse:
        """Removes a runner from the mesh; see RunnerSessionService.RetireSession."""
        return await self._core.write(lambda: self._retire(session_id, process_ended=process_ended))

    async def sweep(self) -> None:
        """Deletes retired runners that could not be deleted before."""
        if self._waiting:
            self._core.require_open()
            await self._core.writer.run(self._sweep)

    async def _retire(self, session_id: str, *, process_ended: bool) -> RetireSessionResponse:
        state = self._core.mesh.of_session(session_id)
        if state is None:
            return _answer(Retirement.UNKNOWN)
        outcome = self._decide(state, process_ended=process_ended)
        if outcome is Retirement.RETIRED:
            return await self._forget(state)
        self._waiting.add((session_id, state.session.incarnation))
        if outcome is Retirement.HOLDS_MEMORY and state.pulse.active:
            self._lose(state)
        log.info("runner is retired later", runner=state.profile.name, outcome=outcome.name)
        return _answer(outcome)

    async def _sweep(self) -> None:
        for session_id, incarnation in sorted(self._waiting):
            state = self._core.mesh.of_session(session_id)
            if state is None or state.session.incarnation != incarnation:
                self._waiting.discard((session_id, incarnation))
            elif self._decide(state, process_ended=False) is Retirement.RETIRED:
                await self._forget(state)
                self._waiting.discard((session_id, incarnation))

    def _decide(self, state: SessionState, *, process_ended: bool) -> Retirement:
        return decide_retirement(
            standing=state.pulse.standing,
            reported=state.reported,
            process_ended=process_ended,
            lease_count=self._lease_count(state.profile.name),
        )

    async def _forget(self, state: SessionState) -> RetireSessionResponse:
        mesh = self._core.mesh
        names = [name for name in state.publications if not mesh.is_declared(ResourceKind.MODEL, name)]
        pools = {pool for name in names if (pool := mesh.pools.pool_of(name)) is not None}
        rows = [row for row in state.rows() if not mesh.is_declared(*row)]
        await self._core.store.delete_sessions([state.session.id])
        changes = mesh.forget([state])
        self._core.publish(changes, events_for(rows, event_pb2.EVENT_REASON_WITHDRAWN, "its runner was retired"))
        log.info("runner retired", runner=state.profile.name, models=len(names))
        answer = _answer(Retirement.RETIRED)
        # Models that were removed from the mesh, without declared ones, and pools that have no members left.
        answer.models.extend(sorted(names))
        answer.pools.extend(sorted(pool for pool in pools if mesh.pool(pool) is None))
        return answer

    def _lose(self, state: SessionState) -> None:
        """Marks a runner as closed; stored with the due pulses."""
        state.lose(Standing.CLOSED, self._core.clock.monotonic(), self._core.clock.utc_now())
        said = events_for(
            state.rows(), event_pb2.EVENT_REASON_CLOSED, f"the process of the runner {state.profile.name} has ended"
        )
        self._core.publish(self._core.mesh.changes_for([state]), said)


def _answer(outcome: Retirement) -> RetireSessionResponse:
    return RetireSessionResponse(outcome=RetireSessionResponse.Outcome.ValueType(outcome))
