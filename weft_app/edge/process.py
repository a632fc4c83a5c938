"""The Envoy of `weft up`: its files, process, restarts and drain."""

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import aiohttp

from runner_svc.policy.backoff import RestartHistory, RestartLimits
from runner_svc.policy.timeouts import StopGraces
from runner_svc.supervise.logs import LogRing
from runner_svc.supervise.process import SupervisedProcess
from runner_svc.supervise.socket_folder import SocketFolder
from weft.kernel.channels.tls import TlsFiles, TlsSource
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.file_replacement import replace_file
from weft.kernel.services.health import WELL, HealthCheck, Observation, down
from weft.kernel.services.service_lifecycle import start_critical, start_task, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock
from weft_app.edge.edge_document import CERTIFICATE, LISTENER, edge_document
from weft_app.edge.plan import Document, EdgePlan, Endpoint

MAX_ANSWER_BYTES = 1_048_576
_ACTIVE = f"http.{LISTENER}.downstream_rq_active"
_CERTIFICATE_TYPE = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"


class EnvoyAdmin:
    """Client of Envoy's admin API. Every failure is a WeftError."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    async def is_ready(self) -> bool:
        """Whether it serves."""
        try:
            return (await self._call("GET", "/ready"))[0] == 200
        except WeftError:
            return False

    async def listener(self) -> Endpoint | None:
        """Returns the listener's bound address; None if there is none yet."""
        status, text = await self._call("GET", "/listeners")
        for line in text.splitlines() if status == 200 else ():
            name, _, address = line.partition("::")
            host, separator, port = address.rpartition(":")
            if name == LISTENER and separator and port.isdecimal():
                return Endpoint(host=host.removeprefix("[").removesuffix("]"), port=int(port))
        return None

    async def drain(self) -> None:
        """Makes Envoy ask callers to reconnect, and close its port after the drain time."""
        await self._call("POST", "/drain_listeners?graceful&skip_exit")

    async def active_requests(self) -> int:
        """Returns the number of active requests."""
        _, text = await self._call("GET", f"/stats?filter=^{_ACTIVE}$")
        _, _, count = text.strip().rpartition(" ")
        return int(count) if count.isdecimal() else 0

    async def _call(self, method: str, path: str) -> tuple[int, str]:
        connector, timeout = aiohttp.UnixConnector(path=str(self._socket)), aiohttp.ClientTimeout(ADMIN_TIMEOUT_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.request(method, f"http://envoy{path}") as answer,
            ):
                return answer.status, (await answer.content.read(MAX_ANSWER_BYTES)).decode("utf-8", "replace")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, f"Envoy's administration does not answer: {error}") from error


CERTIFICATE_CHECK_SECONDS = 5.0
START_TIMEOUT_SECONDS = 20.0
ADMIN_TIMEOUT_SECONDS = 2.0
log = get_logger("weft.edge")

RESTARTS = RestartLimits(max_deaths=5, window_seconds=30.0, first_pause_seconds=1.0, max_pause_seconds=30.0)
"""Envoy is restarted immediately, and after too many deaths in the window with exponential backoff."""
READY_CHECK_SECONDS = 0.05
DRAIN_CHECK_SECONDS = 0.1
DRAIN_NOTICE_SECONDS = 1
"""How long a stop still accepts connections and asks callers to reconnect elsewhere."""
FLUSH_SECONDS = 5.0
"""How long slow readers may take for the last bytes after the gateway has ended."""
GRACES = StopGraces(first_term_seconds=3.0, second_term_seconds=1.0, kill_seconds=5.0)
MAX_SAID_LINES = 3
"""Maximum number of reported errors of an ended process ..."""
MAX_LOOKED_AT = 50
"""... among this many last lines."""
_ENVIRONMENT = ("PATH", "HOME", "TMPDIR", "TZ", "LD_LIBRARY_PATH")
"""Environment variables for Envoy, which must not get the keys of providers."""


class EdgeProxy:
    """A supervised Envoy. Life cycle: start, drain, stop. It ends with this process, even if this process is killed."""

    def __init__(
        self,
        plan: EdgePlan,
        binary: Path,
        folder: Path,
        clock: Clock,
        *,
        tls: TlsFiles | None,
        ended: Callable[[str], None],
        restarted: Callable[[], None],
    ) -> None:
        """`plan` comes without certificate and admin API, which are added here. Its files are in `folder`.

        `tls`: the certificate files, which are watched; None: plain HTTP. `ended` gets a sentence when Envoy ends
        unexpectedly, and `restarted` is called when it serves again.
        """
        self._plan = plan
        self._binary = binary
        self._configuration = folder / "envoy.json"
        self._certificate = folder / "envoy-certificate.json"
        """Certificate and key; Envoy reloads the file when it is replaced."""
        self._clock = clock
        self._tls = None if tls is None else TlsSource(tls)
        self._ended = ended
        self._restarted = restarted
        self._ring = LogRing()
        self._process = SupervisedProcess(self._ring, GRACES)
        self._folder: SocketFolder | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._deaths = RestartHistory()
        self._fault = "it has not been started"
        self._certificate_version = 0

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid

    @property
    def restarts(self) -> int:
        """Number of restarts."""
        return self._deaths.total

    @property
    def url(self) -> str:
        """Base URL, once started."""
        return f"{'http' if self._tls is None else 'https'}://{self._plan.listen}"

    def health_check(self) -> HealthCheck:
        """Returns the health check of Envoy for this process."""

        def probe() -> Observation:
            return down("no_edge", f"Envoy does not serve: {self._fault}") if self._fault else WELL

        return HealthCheck(name="edge", probe=probe, is_essential=False)

    async def start(self) -> None:
        """Starts Envoy and waits until it serves. Raises SERVICE_UNAVAILABLE with its last errors."""
        self._folder = SocketFolder("weft-envoy-")
        if self._tls is not None:
            self._write_certificate(self._tls)
        try:
            await self._start_once()
        except BaseException:
            await self.stop()
            raise
        self._tasks.append(start_critical(self._keep_running(), name="edge-proxy"))
        if self._tls is not None:
            self._tasks.append(start_task(self._follow_certificate(self._tls), name="edge-certificate"))

    async def drain(self) -> None:
        """Closes the port after DRAIN_NOTICE_SECONDS; running requests continue. Does nothing while Envoy is down."""
        if self._fault:
            return
        try:
            await self._admin.drain()
        except WeftError as error:
            log.warning("envoy cannot be drained", why=error.message)
            return
        await self._clock.sleep(DRAIN_NOTICE_SECONDS)

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Ends Envoy once no request is active, at the latest after the grace or FLUSH_SECONDS. Idempotent."""
        tasks, self._tasks = self._tasks, []
        await stop_tasks(tasks)
        try:
            if not self._fault:
                await self._until_idle(max(FLUSH_SECONDS, grace_seconds))
        finally:
            self._fault = "it was stopped"
            await self._process.stop()
            if self._folder is not None:
                self._folder.remove()

    @property
    def _admin(self) -> EnvoyAdmin:
        return EnvoyAdmin(self._socket)

    @property
    def _socket(self) -> Path:
        assert self._folder is not None, "it is made by start"
        return self._folder.path / "admin.sock"

    async def _until_idle(self, seconds: float) -> None:
        with suppress(TimeoutError, WeftError):
            async with asyncio.timeout(seconds):
                while await self._admin.active_requests() > 0:
                    await self._clock.sleep(DRAIN_CHECK_SECONDS)

    async def _start_once(self) -> None:
        """Starts the process and waits until it serves. Raises SERVICE_UNAVAILABLE."""
        self._fault = "it is starting"
        self._socket.unlink(missing_ok=True)
        replace_file(self._configuration, json.dumps(self._document()).encode())
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        await self._process.start(self._command(), env=environment, on_lines=_log_lines)
        ended = asyncio.ensure_future(self._process.wait())
        try:
            async with asyncio.timeout(START_TIMEOUT_SECONDS):
                while not await self._admin.is_ready():
                    if ended.done():
                        raise WeftError(
                            Reason.SERVICE_UNAVAILABLE, f"Envoy does not start: {self._said(ended.result())}"
                        )
                    await self._clock.sleep(READY_CHECK_SECONDS)
                got = await self._admin.listener()
        except TimeoutError:
            raise WeftError(
                Reason.SERVICE_UNAVAILABLE,
                f"Envoy does not serve within {START_TIMEOUT_SECONDS:g} s: {self._said('it runs')}",
            ) from None
        finally:
            ended.cancel()
        if got is not None:
            # Keeps the selected free port for restarts: callers know it.
            self._plan = replace(self._plan, listen=got)
        self._fault = ""
        log.info("envoy serves", url=self.url, pid=self.pid)

    def _document(self) -> Document:
        certificate = None if self._tls is None else self._certificate
        return edge_document(replace(self._plan, certificate=certificate, admin_socket=self._socket))

    def _command(self) -> list[str]:
        threads = self._plan.limits.threads
        return [
            *(str(self._binary), "-c", str(self._configuration), "--disable-hot-restart"),
            # Hides notices about experimental filters at each start.
            *("-l", "warning", "--component-log-level", "misc:error", "--log-format", "[%l] %v"),
            *("--drain-time-s", str(DRAIN_NOTICE_SECONDS), "--drain-strategy", "immediate"),
            *(() if threads is None else ("--concurrency", str(threads))),
        ]

    def _said(self, how: str) -> str:
        said = self._ring.last(MAX_LOOKED_AT)
        lines = [line for line in said if line.startswith(("[error]", "[critical]"))][-MAX_SAID_LINES:]
        return f"{how}: {' / '.join(lines)}" if lines else how

    async def _keep_running(self) -> None:
        while True:
            how = self._said(await self._process.wait())
            self._fault = how
            log.error("envoy ended", why=how)
            self._ended(f"Envoy ended ({how}); it is restarted")
            await self._start_again()
            self._restarted()

    async def _start_again(self) -> None:
        while self._fault:
            self._deaths, pause = self._deaths.after_death(self._clock.monotonic(), RESTARTS)
            await self._clock.sleep(pause)
            try:
                await self._start_once()
            except (WeftError, OSError) as error:
                self._fault = error.message if isinstance(error, WeftError) else f"{error.strerror}"
                log.error("envoy cannot be started again", why=self._fault)  # noqa: TRY400 - no traceback needed

    def _write_certificate(self, source: TlsSource) -> None:
        version, material = source.current()
        pair = {
            "certificate_chain": {"inline_string": material.certificate.decode()},
            "private_key": {"inline_string": material.key.decode()},
        }
        secret = {"@type": _CERTIFICATE_TYPE, "name": CERTIFICATE, "tls_certificate": pair}
        # One file, so that certificate and key always match; only this user can read it.
        replace_file(self._certificate, json.dumps({"resources": [secret]}).encode())
        self._certificate_version = version

    async def _follow_certificate(self, source: TlsSource) -> None:
        while True:
            await self._clock.sleep(CERTIFICATE_CHECK_SECONDS)
            version, _ = await asyncio.to_thread(source.current)
            if version == self._certificate_version:
                continue
            try:
                self._write_certificate(source)
            except OSError as error:
                # Such as a full disk. Envoy keeps the certificate in use; the next check tries again.
                log.error("envoy's new certificate cannot be written", why=error.strerror)  # noqa: TRY400 - no traceback needed
            else:
                log.info("envoy gets a new certificate")


def _log_lines(lines: list[str]) -> None:
    """Logs lines of Envoy at their levels."""
    for line in lines:
        level, _, text = line.removeprefix("[").partition("] ")
        if level in {"error", "critical"}:
            log.error("envoy log", line=text)
        else:
            log.warning("envoy log", line=text or line)
