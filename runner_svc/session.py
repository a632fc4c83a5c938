"""The runner's session with the registry: opened, kept alive, opened again when it is lost."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc
import structlog

from runner_svc.report import RunnerReport
from weft.api.registry.v1 import runner_session_service_pb2 as pb
from weft.api.registry.v1 import runner_session_service_pb2_grpc
from weft.dispatch.tickets import TicketGate
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.ids import new_id
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call
from weft.kernel.service import start_task, stop_tasks

if TYPE_CHECKING:
    from weft.api.registry.v1.runner_session_service_pb2_grpc import RunnerSessionServiceAsyncStub

log = structlog.get_logger("weft.session")

CALL_TIMEOUT_SECONDS = 5.0
CLOSE_TIMEOUT_SECONDS = 1.0
FIRST_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 5.0


class RunnerSession:
    """Reports to the registry on every change and on every report interval; serves on while the registry is away."""

    def __init__(
        self,
        *,
        registry: grpc.aio.Channel,
        report: RunnerReport,
        gate: TicketGate,
        incarnation: str,
        session_file: Path,
        clock: Clock,
    ) -> None:
        self._stub = cast(
            "RunnerSessionServiceAsyncStub", runner_session_service_pb2_grpc.RunnerSessionServiceStub(registry)
        )
        self._report = report
        self._gate = gate
        self._incarnation = incarnation
        self._session_file = session_file
        self._clock = clock
        self._session_id = ""
        self._report_interval_seconds = MAX_RETRY_SECONDS
        self._sequence = 0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def note_change(self) -> None:
        """Something changed that routers should hear of at once."""
        self._changed.set()

    async def start(self) -> None:
        """Begin to report. Returns at once; the session opens as soon as the registry answers."""
        self._task = start_task(self._run(), name="runner-session")

    async def report_now(self) -> None:
        """Send one heartbeat, if the session is open; a registry that is away is not an error here."""
        if self._session_id:
            with suppress(WeftError):
                await self._heartbeat()

    async def stop(self) -> None:
        """Say good-bye, so that nobody waits for us. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        await stop_tasks([task])
        if self._session_id:
            request = pb.CloseSessionRequest(session_id=self._session_id, incarnation=self._incarnation)
            with suppress(grpc.aio.AioRpcError):
                await self._stub.CloseSession(request, timeout=CLOSE_TIMEOUT_SECONDS)

    async def _run(self) -> None:
        pause = FIRST_RETRY_SECONDS
        while True:
            try:
                if not self._session_id:
                    await self._open()
                await self._heartbeat()
                pause = FIRST_RETRY_SECONDS
                await self._wait_for_change_or_interval()
            except WeftError as error:
                self._note_failure(error)
                await self._clock.sleep(pause)
                pause = min(pause * 2, MAX_RETRY_SECONDS)

    async def _open(self) -> None:
        request = pb.OpenSessionRequest(
            request_id=new_id("open"),
            session_id=self._session_file.read_text("utf-8").strip() if self._session_file.exists() else "",
            runner=self._report.runner(),
            models=self._report.manifests(),
        )
        try:
            response = await self._stub.OpenSession(request, timeout=CALL_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error
        self._gate.use_key(response.ticket_key)
        self._keep(response.session_id)
        self._report_interval_seconds = response.report_interval.ToNanoseconds() / 1e9
        self._session_id = response.session_id
        log.info("session open", session_id=response.session_id)

    def _keep(self, session_id: str) -> None:
        self._session_file.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._session_file.with_suffix(".new")
        fresh.write_text(session_id + "\n", "utf-8")
        fresh.replace(self._session_file)

    async def _heartbeat(self) -> None:
        self._changed.clear()
        self._sequence += 1
        request = pb.HeartbeatRequest(
            session_id=self._session_id,
            incarnation=self._incarnation,
            sequence=self._sequence,
            capability=self._report.capability(),
        )
        try:
            await self._stub.Heartbeat(request, timeout=CALL_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error

    async def _wait_for_change_or_interval(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), self._report_interval_seconds)

    def _note_failure(self, error: WeftError) -> None:
        if error.reason is Reason.SESSION_UNKNOWN:
            log.warning("the registry does not know this session, opening a new one")
            self._session_id = ""
        elif error.reason is Reason.SERVICE_UNAVAILABLE:
            log.warning("the registry is away, serving on")
        else:
            log.error("the registry refused", reason=error.reason.name, message=error.message)
