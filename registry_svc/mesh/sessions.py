"""Sessions of runners: open, heartbeat, close. Expiry is in `expiry`."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from datetime import datetime

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.events import (
    events_for,
    left_out_event,
    left_out_events,
    opening_events,
    report_events,
    waking_after,
)
from registry_svc.mesh.name_owners import owners_of_name
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
from registry_svc.mesh.policy.joining import Joiner
from registry_svc.mesh.policy.limits import require_room
from registry_svc.mesh.publication import Publication
from registry_svc.mesh.records import Held, compact, kept, unowned_in
from registry_svc.mesh.requests import valid_heartbeat, valid_opening
from registry_svc.mesh.session_state import SessionState
from registry_svc.mesh.states import Session, Standing
from registry_svc.mesh.store import profile_of
from weft.api.registry.v1 import agent_pb2, event_pb2, model_pb2, registry_service_pb2, runner_pb2
from weft.api.registry.v1.runner_pb2 import LeftOut
from weft.api.registry.v1.runner_session_service_pb2 import HeartbeatRequest, OpenSessionRequest
from weft.documents.left_out import bounded
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.timestamps import stamp_of
from weft.kernel.values.names import is_name, new_id, new_key

log = get_logger("weft.registry")

MAX_HOST_CHARS = 100
"""Characters of a stated host name that a renamed host keeps."""
MAX_RESERVED_NAMES = 2_000
"""Maximum names that stay reserved for one machine."""
MAX_REFUSED_RUNNERS = 1_000
"""Maximum number of runners whose refusal is remembered."""
_REFUSALS = frozenset(
    {Reason.ALREADY_EXISTS, Reason.INVALID_ARGUMENT, Reason.PERMISSION_DENIED, Reason.TOO_MANY_RESOURCES}
)
IncarnationAt = Callable[[str], Awaitable[str]]
"""Returns the incarnation of the runner at an address; empty if none answers."""


class SessionManager:
    """Opens and closes sessions, and validates heartbeats, one write at a time.

    Acknowledged changes are on disk, except heartbeats, whose times Expiry stores periodically.
    """

    def __init__(
        self,
        core: RegistryCore,
        incarnation_at: IncarnationAt | None = None,
        is_local_host: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`incarnation_at` probes whether a runner's earlier process is gone; None: only silence proves that.

        `is_local_host` returns whether a program or runner of the mesh itself observes a host.
        """
        self._core = core
        self._is_local_host = is_local_host
        self._incarnation_at = incarnation_at
        self._clock = core.clock
        self._config = core.config
        self._refused: dict[str, str] = {}
        """Why the last session of a runner was refused, by its name."""

    async def open_session(self, opening: OpenSessionRequest) -> Session:
        """Publishes a runner, its models and agents; see RunnerSessionService.OpenSession."""
        try:
            invalid = valid_opening(opening, self._config)
            replaced = await self._replaced_session(opening)
            session = await self._core.write(lambda: self._open(opening, replaced, invalid))
        except WeftError as error:
            self._note_refusal(opening.runner.name, error)
            raise
        self._refused.pop(session.runner, None)
        return session

    def left_out(self, session: Session) -> Sequence[LeftOut]:
        """Returns the items of a session's runner that the registry did not publish."""
        state = self._core.mesh.of_session(session.id)
        return () if state is None else state.left_out

    def host(self, session: Session) -> str:
        """Returns the mesh's name of a session's machine."""
        state = self._core.mesh.of_session(session.id)
        return "" if state is None else state.profile.host

    def refusal(self, runner: str) -> str:
        """Returns why a runner's last session was refused; empty: it was not."""
        return self._refused.get(runner, "")

    def _note_refusal(self, runner: str, error: WeftError) -> None:
        """Records an event for a new reason for which a runner cannot join."""
        is_told = self._refused.get(runner) == error.message
        if error.reason not in _REFUSALS or is_told or not is_name(runner):
            return
        if len(self._refused) >= MAX_REFUSED_RUNNERS:
            del self._refused[next(iter(self._refused))]
        self._refused[runner] = error.message
        told = left_out_event(ResourceKind.RUNNER, runner, f"the runner is refused: {error.message}")
        self._core.publish((), [told])

    async def heartbeat(self, beat: HeartbeatRequest) -> None:
        """Records a heartbeat without the invalid parts of its report. Raises SESSION_UNKNOWN or STALE_HEARTBEAT."""
        invalid = valid_heartbeat(beat, self._config)
        async with self._core.writer.turn():
            self._core.require_open()
            state = self._core.mesh.of_session(beat.session_id)
            if state is None or (state.profile.dial_out and self._is_local_host(state.profile.host)):
                # A runner of the mesh itself that opened later takes its host: a new opening gets another one.
                raise unknown_session()
            if self._core.mesh.declared_instead(state.listed & state.publications.keys()):
                # The next opening leaves them out, and the runner serves them under other names.
                raise unknown_session()
            hearing = validate_heartbeat(
                beat.incarnation, beat.sequence, state.session, state.pulse.standing, state.sequence
            )
            self._revive(state, beat, hearing, invalid)

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

    async def _open(self, opening: OpenSessionRequest, replaced: str, invalid: Sequence[LeftOut]) -> Session:
        mesh = self._core.mesh
        if replaced and (earlier := mesh.of_session(replaced)) is not None and earlier.pulse.active:
            log.warning("a runner without its session id answers at its own address", runner=opening.runner.name)
            earlier.lose(Standing.SILENT, self._clock.monotonic(), self._clock.utc_now())
            try:
                return await self._open(opening, "", invalid)
            except BaseException:
                # Its process is gone, whatever becomes of the new one. After a success watchers see only that one.
                self._core.publish(mesh.changes_for([earlier]))
                raise
        joiner = self._core.joiner(opening.runner.joined_by) if opening.runner.joined_by else None
        own, named = mesh.of_session(opening.session_id), mesh.of_runner(opening.runner.name)
        is_other = named is not None and _joining(named.profile) != _joining(opening.runner)
        if joiner is not None:
            joiner = joiner if own is None else joiner.owning(_names(own))
            joiner.require_name(opening.runner.name)
        decision = decide_opening(
            _identity(opening),
            own=None if own is None else own.as_holder(),
            # A machine that joined cannot repeat the calls of others.
            runner_holder=None if named is None or is_other else named.as_holder(),
            wanted=[owners_of_name(mesh, ResourceKind.RUNNER, opening.runner.name, joiner=joiner)],
        )
        if isinstance(decision, Repeated):
            return decision.session
        if own is None and named is None:
            require_room("runners", len(mesh), 1, self._config.max_runners)
        publication = Publication(mesh, self._config, opening.runner.name, decision, joiner)
        refused = publication.leave_out(opening)
        decision = Admitted(adopted=decision.adopted, evicted=tuple(sorted(publication.ended)))
        leaving = self._leaving(decision)
        if opening.runner.dial_out:
            self._give_own_host(opening.runner, decision.adopted)
        state = self._new_member(opening, decision, (*invalid, *refused))
        if joiner is not None:
            await self._reserve(joiner, state)
        await self._core.store.save_session(state.stored(), evicted=decision.evicted)
        state.saved_pulse = state.pulse
        drafts = self._opening_events(state, leaving)
        self._core.publish(mesh.install(state, decision.evicted), drafts)
        log.info("session opened", runner=opening.runner.name, models=len(opening.models), adopted=own is not None)
        return state.session

    async def _reserve(self, joiner: Joiner, state: SessionState) -> None:
        """Keeps the names of a joined runner for its machine, also after its session is deleted."""
        earlier = self._core.mesh.of_runner(state.profile.name)
        own, left = _names(state) - {joiner.pool}, set() if earlier is None else _names(earlier)
        for token in list(self._core.join_tokens.values()):
            before = set(token.names.split())
            names = before - left | own if token.id == joiner.id else before - own
            if len(names) > MAX_RESERVED_NAMES:
                raise WeftError(Reason.TOO_MANY_RESOURCES, f"a machine has at most {MAX_RESERVED_NAMES} names")
            if names != before:
                kept = replace(token, names=" ".join(sorted(names)))
                await self._core.store.save_join_token(kept)
                self._core.join_tokens[token.id] = kept

    def _give_own_host(self, runner: runner_pb2.Runner, adopted: Session | None) -> None:
        """Renames the host of a joined runner if others state it: leases and evictions there are theirs."""
        if self._is_of_others(runner, adopted):
            runner.host = f"{runner.host[:MAX_HOST_CHARS]} ({runner.name})"
        if self._is_of_others(runner, adopted):
            raise WeftError(Reason.ALREADY_EXISTS, f"another machine states the host name {runner.host!r}")

    def _is_of_others(self, runner: runner_pb2.Runner, adopted: Session | None) -> bool:
        there = [each for each in self._core.mesh if each.profile.host == runner.host]
        others = [each for each in there if _joining(each.profile) != _joining(runner)]
        is_stated = any(adopted is None or each.session.id != adopted.id for each in others)
        return bool(runner.host) and (is_stated or self._is_local_host(runner.host))

    def _leaving(self, decision: Admitted) -> list[SessionState]:
        """Returns the sessions that this one replaces: its earlier one, and dead sessions that end."""
        ids = [*decision.evicted] if decision.adopted is None else [decision.adopted.id, *decision.evicted]
        found = (self._core.mesh.of_session(session_id) for session_id in ids)
        return [state for state in found if state is not None]

    def _opening_events(self, state: SessionState, leaving: list[SessionState]) -> list[event_pb2.Event]:
        mesh, name = self._core.mesh, state.profile.name
        rows = list(state.rows())
        earlier = {(ResourceKind.MODEL, each) for each in state.publications if mesh.publisher_of(each)}
        earlier |= {(ResourceKind.AGENT, each) for each in state.agents if mesh.published_agent(each)}
        earlier |= {(ResourceKind.RUNNER, name)} if mesh.of_runner(name) else set()
        gone = [row for each in leaving for row in each.rows() if row not in rows]
        own = next((each for each in leaving if each.session.id == state.session.id), None)
        if own is not None and own.pulse.active and own.session.incarnation == state.session.incarnation:
            # The session goes on with other items.
            unchanged = set(own.rows())
            rows = [row for row in rows if row not in unchanged]
        left_before = () if own is None else own.capability.message().left_out
        told = left_out_events(name, left_before, state.capability.message().left_out)
        return [*opening_events(rows, earlier, gone, name), *told]

    def _new_member(self, opening: OpenSessionRequest, decision: Admitted, left: tuple[LeftOut, ...]) -> SessionState:
        now, adopted = self._clock.utc_now(), decision.adopted
        earlier = None if adopted is None else self._core.mesh.of_session(adopted.id)
        add_left_out(opening.runner.capability, left)
        return SessionState(
            session=_session(opening, decision),
            profile=compact(profile_of(opening.runner)),
            pulse=alive_pulse(self._clock.monotonic()),
            last_heartbeat_at=now,
            capability=Held(self._kept(opening.runner.capability, {each.name for each in opening.models}, earlier)),
            reported=True,
            left_out=left,
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

    def _revive(
        self, state: SessionState, beat: HeartbeatRequest, hearing: HeartbeatKind, invalid: Sequence[LeftOut]
    ) -> None:
        was_active, earlier = state.pulse.active, state.capability
        was_asleep, had_failed, ran = state.sleeping, state.failed, state.runtimes
        reported_before = state.reported
        state.revive(self._clock.monotonic(), self._clock.utc_now())
        if hearing is HeartbeatKind.FRESH:
            state.sequence = beat.sequence
            if beat.HasField("capability"):
                add_left_out(beat.capability, (*state.left_out, *invalid))
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
            if reported_before:
                before, now = earlier.message().left_out, state.capability.message().left_out
                drafts += left_out_events(state.profile.name, before, now)
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


def _names(state: SessionState) -> set[str]:
    pools = {each.message().manifest.pool_name for each in state.publications.values()} - {""}
    return {name for _, name in state.rows()} | pools


def _joining(runner: runner_pb2.Runner) -> tuple[bool, str]:
    return runner.dial_out, runner.joined_by


def _identity(opening: OpenSessionRequest) -> Opening:
    runner = opening.runner
    return Opening(
        request_id=opening.request_id, runner=runner.name, incarnation=runner.incarnation, address=runner.address
    )


def add_left_out(report: runner_pb2.Capability, items: Sequence[LeftOut]) -> None:
    """Adds what the registry leaves out to a report."""
    if items:
        found = bounded([*report.left_out, *items])
        del report.left_out[:]
        report.left_out.extend(found)


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
