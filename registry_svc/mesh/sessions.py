"""Sessions of runners: open, heartbeat, close. Expiry is in `expiry`."""

from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from datetime import datetime

from registry_svc.mesh.claims import claim_to
from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.domain import Session, Standing
from registry_svc.mesh.events import events_for, opening_events, report_events, waking_after
from registry_svc.mesh.policy.declarations import absent, exists
from registry_svc.mesh.policy.heartbeat import (
    Admitted,
    HeartbeatKind,
    Opening,
    Repeated,
    alive_pulse,
    decide_opening,
    is_repeat,
    unknown_session,
    validate_heartbeat,
)
from registry_svc.mesh.policy.limits import require_room
from registry_svc.mesh.policy.namespace import Claim
from registry_svc.mesh.records import Held, compact, kept, pool_name_of, unowned_in
from registry_svc.mesh.session_state import SessionState
from registry_svc.mesh.store import profile_of
from weft.api.registry.v1 import agent_pb2, event_pb2, model_pb2, registry_service_pb2, runner_pb2
from weft.api.registry.v1.runner_session_service_pb2 import HeartbeatRequest, OpenSessionRequest
from weft.documents.kinds import DECLARED_KINDS
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.log import get_logger
from weft.kernel.names import new_id, new_key
from weft.kernel.timestamps import stamp_of

log = get_logger("weft.registry")

IncarnationAt = Callable[[str], Awaitable[str]]
"""Returns the incarnation of the runner at an address; empty if none answers."""


class SessionManager:
    """Opens and closes sessions, and validates heartbeats, one write at a time.

    Acknowledged changes are on disk, except heartbeats, whose times Expiry stores periodically.
    """

    def __init__(self, core: RegistryCore, incarnation_at: IncarnationAt | None = None) -> None:
        """`incarnation_at` probes whether a runner's earlier process is gone; None: only silence proves that."""
        self._core = core
        self._incarnation_at = incarnation_at
        self._clock = core.clock
        self._config = core.config

    async def open_session(self, opening: OpenSessionRequest) -> Session:
        """Publishes a runner, its models and agents; see RunnerSessionService.OpenSession."""
        replaced = await self._replaced_session(opening)
        return await self._core.write(lambda: self._open(opening, replaced))

    async def heartbeat(self, beat: HeartbeatRequest) -> None:
        """Records a heartbeat. Raises SESSION_UNKNOWN or STALE_HEARTBEAT."""
        async with self._core.writer.turn():
            self._core.require_open()
            state = self._core.mesh.of_session(beat.session_id)
            if state is None:
                raise unknown_session()
            hearing = validate_heartbeat(
                beat.incarnation, beat.sequence, state.session, state.pulse.standing, state.sequence
            )
            self._revive(state, beat, hearing)

    async def close_session(self, session_id: str, incarnation: str) -> None:
        """Makes a runner inactive at its request. Ignores an unknown session or incarnation."""
        await self._core.write(lambda: self._close(session_id, incarnation))

    async def _replaced_session(self, opening: OpenSessionRequest) -> str:
        """Returns the id of the active session that `opening` replaces without specifying it, or "".

        A runner that lost its session id cannot claim its names while its earlier process counts as active. That
        process is gone if the new one answers at the same address.
        """
        holder = self._core.mesh.of_runner(opening.runner.name)
        if holder is None or not holder.pulse.active or self._incarnation_at is None or opening.runner.dial_out:
            return ""
        is_known = holder.session.id == opening.session_id or is_repeat(_identity(opening), holder.session)
        if is_known or holder.profile.address != opening.runner.address or not opening.runner.address:
            return ""
        answering = await self._incarnation_at(holder.profile.address)
        return holder.session.id if answering == opening.runner.incarnation else ""

    async def _open(self, opening: OpenSessionRequest, replaced: str) -> Session:
        mesh = self._core.mesh
        if replaced and (earlier := mesh.of_session(replaced)) is not None and earlier.pulse.active:
            log.warning("a runner without its session id answers at its own address", runner=opening.runner.name)
            earlier.lose(Standing.SILENT, self._clock.monotonic(), self._clock.utc_now())
            try:
                return await self._open(opening, "")
            except BaseException:
                # Its process is gone, whatever becomes of the new one. After a success watchers see only that one.
                self._core.publish(mesh.changes_for([earlier]))
                raise
        own, named = mesh.of_session(opening.session_id), mesh.of_runner(opening.runner.name)
        decision = decide_opening(
            _identity(opening),
            own=None if own is None else own.as_holder(),
            runner_holder=None if named is None else named.as_holder(),
            claims=self._claims(opening),
        )
        if isinstance(decision, Repeated):
            return decision.session
        leaving = self._leaving(decision)
        if own is None and named is None:
            require_room("runners", len(mesh), 1, self._config.max_runners)
        self._require_room(opening)
        self._require_targets(opening, leaving)
        state = self._new_member(opening, decision)
        await self._core.store.save_session(state.stored(), evicted=decision.evicted)
        state.saved_pulse = state.pulse
        drafts = self._opening_events(state, leaving)
        self._core.publish(mesh.install(state, decision.evicted), drafts)
        log.info("session opened", runner=opening.runner.name, models=len(opening.models), adopted=own is not None)
        return state.session

    def _claims(self, opening: OpenSessionRequest) -> list[Claim]:
        mesh = self._core.mesh
        # If a model is also declared, the declared pool applies.
        pools = {each.pool_name for each in opening.models if each.pool_name and not mesh.declared_model(each.name)}
        return [
            claim_to(mesh, ResourceKind.RUNNER, opening.runner.name),
            *(claim_to(mesh, ResourceKind.MODEL, each.name) for each in opening.models),
            *(claim_to(mesh, ResourceKind.AGENT, each.name) for each in opening.agents),
            *(claim_to(mesh, ResourceKind.POOL, name) for name in sorted(pools)),
        ]

    def _leaving(self, decision: Admitted) -> list[SessionState]:
        """Returns the sessions that this one replaces: its earlier one, and dead sessions that end."""
        ids = [*decision.evicted] if decision.adopted is None else [decision.adopted.id, *decision.evicted]
        found = (self._core.mesh.of_session(session_id) for session_id in ids)
        return [state for state in found if state is not None]

    def _require_room(self, opening: OpenSessionRequest) -> None:
        mesh, config = self._core.mesh, self._config
        new_models = sum(mesh.model(each.name) is None for each in opening.models)
        new_agents = sum(mesh.agent(each.name) is None for each in opening.agents)
        require_room("models", len(mesh.pools), new_models, config.max_models)
        require_room("agents", len(mesh.targets), new_agents, config.max_agents)
        growth = mesh.sizes.growth_bytes(
            (kind, each.name, each)
            for kind, manifests in ((ResourceKind.MODEL, opening.models), (ResourceKind.AGENT, opening.agents))
            for each in manifests
        )
        require_room("bytes of models, agents and routes", mesh.sizes.total_bytes, growth, config.max_manifest_bytes)

    def _require_targets(self, opening: OpenSessionRequest, leaving: list[SessionState]) -> None:
        mesh = self._core.mesh
        gone = {name for state in leaving for name in state.publications if not mesh.declared_model(name)}
        arriving: dict[str, str] = {}
        for manifest in opening.models:
            declared = mesh.declared_model(manifest.name)
            arriving[manifest.name] = pool_name_of(manifest if declared is None else declared.manifest)
        for agent in opening.agents:
            for reference in DECLARED_KINDS[ResourceKind.AGENT].references_of(agent):
                to = reference.field.to
                if not exists(mesh.target(reference.target), to, arriving=arriving, leaving=gone):
                    raise absent(ResourceKind.AGENT, agent.name, reference, mesh.names_of(ResourceKind(to.value)))

    def _opening_events(self, state: SessionState, leaving: list[SessionState]) -> list[event_pb2.Event]:
        mesh, name = self._core.mesh, state.profile.name
        rows = list(state.rows())
        earlier = {(ResourceKind.MODEL, each) for each in state.publications if mesh.publisher_of(each)}
        earlier |= {(ResourceKind.AGENT, each) for each in state.agents if mesh.published_agent(each)}
        earlier |= {(ResourceKind.RUNNER, name)} if mesh.of_runner(name) else set()
        gone = [row for each in leaving for row in each.rows() if row not in rows]
        return list(opening_events(rows, earlier, gone, name))

    def _new_member(self, opening: OpenSessionRequest, decision: Admitted) -> SessionState:
        now, adopted = self._clock.utc_now(), decision.adopted
        earlier = None if adopted is None else self._core.mesh.of_session(adopted.id)
        return SessionState(
            session=_session(opening, decision),
            profile=compact(profile_of(opening.runner)),
            pulse=alive_pulse(self._clock.monotonic()),
            last_heartbeat_at=now,
            capability=Held(self._kept(opening.runner.capability, {each.name for each in opening.models}, earlier)),
            reported=True,
            unowned=unowned_in(opening.runner.capability, {each.name for each in opening.models}),
            publications={each.name: self._publication(each, opening.runner.name, now) for each in opening.models},
            agents={each.name: self._agent_publication(each, opening.runner.name, now) for each in opening.agents},
        )

    def _kept(
        self, report: runner_pb2.Capability, models: Collection[str], earlier: SessionState | None
    ) -> runner_pb2.Capability:
        taken = self._core.mesh.detail_bytes - (0 if earlier is None else earlier.detail_bytes)
        return kept(report, models, self._config.max_detail_bytes - taken)

    def _publication(self, manifest: model_pb2.ModelManifest, runner: str, now: datetime) -> Held[model_pb2.Model]:
        earlier = self._core.mesh.published_model(manifest.name)
        created = stamp_of(now) if earlier is None else earlier[0].create_time
        kind = model_pb2.Model.KIND_VIRTUAL
        return Held(model_pb2.Model(manifest=manifest, runner=runner, kind=kind, create_time=created))

    def _agent_publication(self, manifest: agent_pb2.AgentManifest, runner: str, now: datetime) -> agent_pb2.Agent:
        earlier = self._core.mesh.published_agent(manifest.name)
        created = stamp_of(now) if earlier is None else earlier[0].create_time
        kind = agent_pb2.Agent.KIND_VIRTUAL
        return compact(agent_pb2.Agent(manifest=manifest, runner=runner, kind=kind, create_time=created))

    def _revive(self, state: SessionState, beat: HeartbeatRequest, hearing: HeartbeatKind) -> None:
        was_active, earlier = state.pulse.active, state.capability
        was_asleep, had_failed, ran = state.sleeping, state.failed, state.runtimes
        reported_before = state.reported
        state.revive(self._clock.monotonic(), self._clock.utc_now())
        if hearing is HeartbeatKind.FRESH:
            state.sequence = beat.sequence
            if beat.HasField("capability"):
                self._core.mesh.report(state, self._kept(beat.capability, state.publications, state))
                state.unowned = unowned_in(beat.capability, state.publications)
        drafts = list[event_pb2.Event]()
        if state.capability != earlier:
            drafts = report_events(
                earlier.message().instances,
                state.capability.message().instances,
                state.publications,
                waking=state.waking,
                reported_before=reported_before,
            )
            state.waking = waking_after(earlier.message().instances, state.capability.message().instances, state.waking)
        if not was_active:
            log.info("runner is back", runner=state.profile.name)
            back = events_for(
                state.rows(), event_pb2.EVENT_REASON_REVIVED, f"the runner {state.profile.name} reconnected"
            )
            self._core.publish(self._core.mesh.changes_for([state]), [*back, *drafts])
        elif (state.sleeping, state.failed, state.runtimes) != (was_asleep, had_failed, ran):
            moved = {name for name, _ in state.runtimes.items() ^ ran.items()}
            moved |= state.sleeping ^ was_asleep | state.failed ^ had_failed
            changed = sorted(moved & state.publications.keys())
            self._core.publish(self._core.mesh.changes_for_report(state, changed), drafts)
        elif state.capability != earlier:
            self._core.publish([registry_service_pb2.Change(runner=state.runner())], drafts)

    async def _close(self, session_id: str, incarnation: str) -> None:
        state = self._core.mesh.of_session(session_id)
        if state is None or state.session.incarnation != incarnation or state.pulse.standing is Standing.CLOSED:
            return
        was_active = state.pulse.active
        now, now_utc = self._clock.monotonic(), self._clock.utc_now()
        closed = replace(state.stored_pulse(), standing=Standing.CLOSED, inactive_since=state.inactive_since or now_utc)
        await self._core.store.save_pulses([closed])
        state.lose(Standing.CLOSED, now, now_utc)
        state.saved_pulse = state.pulse
        log.info("session closed", runner=state.profile.name)
        if was_active:
            said = events_for(
                state.rows(), event_pb2.EVENT_REASON_CLOSED, f"the runner {state.profile.name} closed its session"
            )
            self._core.publish(self._core.mesh.changes_for([state]), said)


def _identity(opening: OpenSessionRequest) -> Opening:
    runner = opening.runner
    return Opening(
        request_id=opening.request_id, runner=runner.name, incarnation=runner.incarnation, address=runner.address
    )


def _session(opening: OpenSessionRequest, decision: Admitted) -> Session:
    adopted = decision.adopted
    # A runner reopens its session when its models change: keep the key, so that tickets in transit stay valid.
    goes_on = adopted is not None and adopted.incarnation == opening.runner.incarnation
    return Session(
        id=new_id("ses") if adopted is None else adopted.id,
        request_id=opening.request_id,
        runner=opening.runner.name,
        incarnation=opening.runner.incarnation,
        ticket_key=adopted.ticket_key if adopted is not None and goes_on else new_key(),
    )
