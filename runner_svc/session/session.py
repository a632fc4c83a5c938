"""The runner's session with the registry: opening, heartbeats, reopening after a loss."""

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc

from runner_svc.policy.backoff import retry_pause_seconds
from runner_svc.session.report import RunnerReport
from runner_svc.session.session_file import SessionFile
from runner_svc.waiting import event_within
from weft.api.registry.v1 import agent_pb2, model_pb2, runner_pb2, runner_session_service_pb2_grpc
from weft.api.registry.v1 import runner_session_service_pb2 as pb
from weft.dispatch.tickets import PermitGate, TicketGate
from weft.kernel.channels.rpc import calling
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import REGISTRY_AWAY, Reason
from weft.kernel.services.service_lifecycle import start_critical, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import seconds_of
from weft.kernel.values.names import new_id

if TYPE_CHECKING:
    from weft.api.registry.v1.runner_session_service_pb2_grpc import RunnerSessionServiceAsyncStub


log = get_logger("weft.session")

CALL_TIMEOUT_SECONDS = 5.0
CLOSE_TIMEOUT_SECONDS = 1.0
DEFAULT_HEARTBEAT_INTERVAL_SECONDS = 30.0
DEFAULT_REPORT_INTERVAL_SECONDS = 5.0

LEFT_OUT_RETRY_SECONDS = 30.0
"""Interval of attempts to publish what the registry left out, such as a name that others may have given up."""
PUBLISH_CHECK_SECONDS = 0.02
_AWAY = REGISTRY_AWAY | {Reason.DEADLINE_EXCEEDED}
"""Reasons of a registry that is dead or frozen, or not the owner."""
_LOST_ON_THE_WAY = frozenset({Reason.SERVICE_UNAVAILABLE, Reason.DEADLINE_EXCEEDED})


class RunnerSession:
    """Sends heartbeats: immediately or at the report interval after a change, else at the heartbeat interval.

    A lost connection also causes a heartbeat. The runner continues to serve while the registry is away.
    """

    def __init__(
        self,
        *,
        registry: grpc.aio.Channel,
        report: RunnerReport,
        gates: Sequence[TicketGate | PermitGate],
        incarnation: str,
        session_file: Path,
        clock: Clock,
        jitter: Callable[[], float],
    ) -> None:
        """`gates` receive the session's key; `jitter` returns 0 to 1 and spreads the retries of many runners."""
        self.on_left_out: Callable[[Sequence[runner_pb2.LeftOut]], None] = lambda _: None
        """Called with the models and agents that the registry does not publish."""
        self.on_host: Callable[[str], None] = lambda _: None
        """Called with the name of this host in the mesh. It differs from the own name if another machine uses that."""
        self.requires_all = False
        """Whether the registry refuses the session instead of leaving out models or agents."""
        self._registry = registry
        self._stub = cast(
            "RunnerSessionServiceAsyncStub", runner_session_service_pb2_grpc.RunnerSessionServiceStub(registry)
        )
        self._report = report
        self._gates = gates
        self._incarnation = incarnation
        self._file = SessionFile(session_file)
        self._clock = clock
        self._jitter = jitter
        self._session_id = ""
        self._open_request_id = ""
        self._published: tuple[list[model_pb2.ModelManifest], list[agent_pb2.AgentManifest]] = ([], [])
        """The models and agents of the last opening."""
        self._left_out: Sequence[runner_pb2.LeftOut] = ()
        """What the registry left out at the last opening."""
        self._left_out_until = math.inf
        """Monotonic time of the next attempt to publish what the registry left out; infinite: it left nothing out."""
        self._models_changed = False
        """Whether the open session publishes other models or agents than the runner serves now."""
        self._heartbeat_at = self._looked_at = -math.inf
        """Monotonic times of the last heartbeat and of the last check of the capability."""
        self._heartbeat_interval = DEFAULT_HEARTBEAT_INTERVAL_SECONDS
        self._report_interval = DEFAULT_REPORT_INTERVAL_SECONDS
        self._sent_capability: runner_pb2.Capability | None = None
        """The last capability that the registry acknowledged."""
        self._moves = self._sent_moves = 0
        """Number of changes to another registry: so far, and at the last acknowledged report."""
        self._sequence = 0
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: asyncio.Task[None] | None = None
        self.is_acknowledged = False
        """Whether the registry answered the last call."""

    @property
    def session_id(self) -> str:
        """The session id, which authenticates the runner; empty without an open session."""
        return self._session_id

    def note_change(self) -> None:
        """Reports immediately, because something changed that routers should know."""
        self._changed.set()

    def note_other_registry(self) -> None:
        """Reports immediately, because calls now go to another registry, which has no reports of this runner."""
        self._moves += 1
        self._changed.set()

    def note_models(self) -> None:
        """Publishes the current models and agents immediately. The session keeps its id and its ticket key."""
        self._models_changed = True
        self._changed.set()

    async def start(self) -> None:
        """Starts the session task. Returns immediately; the session opens as soon as the registry answers."""
        self._begin()

    def reopen(self) -> None:
        """Reopens the session immediately with the same id; cancels running calls and retries."""
        if self._running is not None:
            self._running.cancel()
            self._session_id = ""
            self._begin()

    async def until_published(self, seconds: float) -> bool:
        """Waits until the registry has the current models and agents; returns whether it has within this time."""
        deadline = self._clock.monotonic() + seconds
        while self._models_changed or not self._session_id:
            if self._clock.monotonic() >= deadline:
                return False
            await self._clock.sleep(PUBLISH_CHECK_SECONDS)
        return True

    async def report_now(self) -> None:
        """Sends a heartbeat if the session is open; errors are ignored."""
        if self._session_id:
            with suppress(WeftError):
                await self._heartbeat()

    async def stop(self) -> None:
        """Closes the session, so that the mesh stops routing to this runner. Idempotent."""
        if self._running is None:
            return
        self._running = None
        await stop_tasks(self._tasks)
        if self._session_id:
            request = pb.CloseSessionRequest(session_id=self._session_id, incarnation=self._incarnation)
            self._session_id = ""
            with suppress(WeftError), calling(Reason.SERVICE_UNAVAILABLE):
                await self._stub.CloseSession(request, timeout=CLOSE_TIMEOUT_SECONDS)

    def _begin(self) -> None:
        self._running = start_critical(self._run(), name="runner-session")
        # A cancelled run may still be unwinding; `stop` waits for it too.
        self._tasks.add(self._running)
        self._running.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                is_retry = self._clock.monotonic() >= self._left_out_until
                if not self._session_id or self._models_changed or is_retry:
                    await self._publish()
                await self._report_what_is_due()
                failures, self.is_acknowledged = 0, True
                due = min(self._heartbeat_at + self._heartbeat_interval, self._looked_at + self._report_interval)
                due = min(due, self._left_out_until)
                await event_within(self._clock, max(0.0, due - self._clock.monotonic()), self._changed)
            except WeftError as error:
                self._note_failure(error)
                failures, self.is_acknowledged = failures + 1, False
                await self._clock.sleep(retry_pause_seconds(failures, self._jitter()))

    async def _publish(self) -> None:
        """Opens the session with the current models. A refused change does not end an open session."""
        try:
            await self._open()
        except WeftError as error:
            if self._session_id and error.reason not in _AWAY:
                with suppress(WeftError):
                    await self._report_what_is_due()
            raise

    async def _open(self) -> None:
        # The request id stays until there is an answer: if only the answer was lost, the same session is returned.
        models, agents = self._report.manifests(), self._report.agents()
        if not self._open_request_id:
            self._open_request_id, self._published = new_id("open"), (models, agents)
        request = pb.OpenSessionRequest(
            request_id=self._open_request_id,
            session_id=self._file.read(),
            runner=self._report.runner(),
            models=models,
            agents=agents,
            requires_all=self.requires_all,
        )
        began = self._clock.monotonic()
        try:
            with calling(Reason.SERVICE_UNAVAILABLE):
                response = await self._stub.OpenSession(request, timeout=CALL_TIMEOUT_SECONDS)
        except WeftError as failure:
            if failure.reason not in _LOST_ON_THE_WAY:
                self._open_request_id = ""
            raise
        self._open_request_id = ""
        # The answer to a repeated request is about the models and agents of its first attempt.
        self._models_changed = self._published != (self._report.manifests(), self._report.agents())
        if (offset := self._report.clock_offset) is not None:
            offset.allow(seconds_of(response.max_clock_offset) if response.HasField("max_clock_offset") else None)
        self._note_time(response, began)
        for gate in self._gates:
            gate.use_key(response.ticket_key)
        self._file.keep(response.session_id)
        self.on_host(response.host)
        self._heartbeat_at = self._looked_at = -math.inf
        self._heartbeat_interval = seconds_of(response.heartbeat_interval) or DEFAULT_HEARTBEAT_INTERVAL_SECONDS
        self._report_interval = seconds_of(response.report_interval) or DEFAULT_REPORT_INTERVAL_SECONDS
        self._sent_capability = None
        self._session_id = response.session_id
        log.info("session open")  # without its id, which proves ownership
        # What is left out is tried again at intervals, and logged once.
        for item in (each for each in response.left_out if each not in self._left_out):
            log.warning("not served by the mesh", kind=item.kind, name=item.name, why=item.message)
        self._left_out = tuple(response.left_out)
        self._left_out_until = self._clock.monotonic() + LEFT_OUT_RETRY_SECONDS if response.left_out else math.inf
        self.on_left_out(response.left_out)

    async def _report_what_is_due(self) -> None:
        self._changed.clear()
        now = self._looked_at = self._clock.monotonic()
        is_due = now - self._heartbeat_at >= self._heartbeat_interval
        # A restarted registry has lost the last report; the lost connection reveals that.
        is_connected = self._registry.get_state() is grpc.ChannelConnectivity.READY
        is_sent = self._report.capability() == self._sent_capability and self._moves == self._sent_moves
        if not is_connected or is_due or not is_sent:
            await self._heartbeat()

    async def _heartbeat(self) -> None:
        self._sequence += 1
        moves = self._moves
        capability = self._report.capability()
        request = pb.HeartbeatRequest(
            session_id=self._session_id,
            incarnation=self._incarnation,
            sequence=self._sequence,
            capability=capability,
        )
        began = self._clock.monotonic()
        with calling(Reason.SERVICE_UNAVAILABLE):
            response = await self._stub.Heartbeat(request, timeout=CALL_TIMEOUT_SECONDS)
        self._sent_capability, self._sent_moves = capability, moves
        self._heartbeat_at = began
        self._note_time(response, began)

    def _note_time(self, response: pb.OpenSessionResponse | pb.HeartbeatResponse, began: float) -> None:
        """Updates the clock offset. Registries of earlier releases send no time."""
        offset = self._report.clock_offset
        if offset is not None and response.HasField("mesh_time") and response.HasField("registry_time"):
            offset.note(response.mesh_time, response.registry_time, began)

    def _note_failure(self, error: WeftError) -> None:
        if error.reason is Reason.SESSION_UNKNOWN:
            log.warning("registry does not know this session; opening a new one")
            self._session_id = ""
        elif error.reason in _AWAY:
            log.warning("the registry does not serve; still serving", message=error.message)
        else:
            log.error("the registry refused", reason=error.reason.name, message=error.message)
