"""Publishers of a mesh: each becomes a dial-out runner of this process, which serves its models over HTTP.

The runner joins like any dial-out runner: with the publisher's token, over the relay, within the relay's limits. Only
its backend differs, see `publisher_backend.py`.
"""

import asyncio
import secrets
import tempfile
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import grpc
import msgspec

import runner_svc.runner_service
from runner_svc.dial_out import DialOut, DialOutConfig, LinkEvent, LinkState
from runner_svc.instance.instance_settings import ServedModel
from runner_svc.policy.timeouts import TimeoutProfile
from runner_svc.runner_config import RunnerConfig
from runner_svc.runner_settings import RunnerSettings
from runner_svc.runtimes.runtime_settings import UpstreamSettings
from runner_svc.runtimes.table import ATTACHED_RUNTIME, require_runtime
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import start_task, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import SystemClock
from weft.link.link import LINK_CHANNEL_OPTIONS
from weft_app.compose.grpc_host import GrpcHost
from weft_app.compose.join_listeners import JoinParts
from weft_app.compose.machine_credential import machine_credential
from weft_app.compose.served_models import runner_context, served_model
from weft_extensions.publishers.messages import Registration
from weft_extensions.publishers.publisher_backend import NOWHERE, PublishedModel
from weft_extensions.publishers.session import PublisherLimits, PublisherSession

log = get_logger("weft.publishers")

RUNTIME_NAME = "http"
"""The runtime of a publisher in `weft get runners`."""
SECRET_BYTES = 32
MAX_SECRET_CHARS = 256
KEPT_IDS_PER_SESSION = 4
"""Number of kept session ids of past publishers, per allowed concurrent publisher."""


class PublisherRunner:
    """A publisher as a dial-out runner of this process. Life cycle: `start`, then `drain` or `stop`."""

    def __init__(
        self, session: PublisherSession, config: RunnerConfig, *, own_address: str, relay_address: str, token: str
    ) -> None:
        """`own_address` is the gRPC target of its server, `relay_address` the private one of the relay."""
        self.session = session
        self._joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._host = GrpcHost()
        address = self._host.bind(own_address)
        runner = self._runner = runner_svc.runner_service.build(replace(config, registry_address=address))

        async def open_channel() -> grpc.aio.Channel:
            return grpc.aio.insecure_channel(relay_address, options=LINK_CHANNEL_OPTIONS)

        self._dial_out = DialOut(
            DialOutConfig(
                target="the relay of this mesh",
                open_channel=open_channel,
                token=token,
                machine=machine_credential(token),
                local_address=address,
            ),
            self._note,
            carried=lambda: runner.carried,
            note_fresh_link=runner.reopen_session,
            note_mesh_time=runner.note_mesh_time,
        )
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Joins. Returns once the mesh has the models; raises the error if it rejects them."""
        await self._host.start([self._dial_out, self._runner])
        self._following = start_task(self._follow(), name="publisher-link")
        await self._joined

    async def drain(self, grace_seconds: float) -> None:
        """Rejects new tasks, lets running ones end within the grace, and ends the session."""
        await self._host.stop(grace_seconds)
        self.session.end(WeftError(Reason.SHUTTING_DOWN, "the publisher has left the mesh"))

    async def stop(self, error: WeftError) -> None:
        """Ends the session, its tasks and its link immediately. Idempotent."""
        self.session.end(error)
        if self._following is not None:
            await stop_tasks([self._following])
        # The link first: its loss immediately tells the mesh that the runner is gone.
        await self._dial_out.stop(0.0)
        await self._host.stop(0.0)

    async def _follow(self) -> None:
        self._fail(await self._dial_out.given_up())

    def _note(self, event: LinkEvent) -> None:
        if event.state is LinkState.JOINED and not self._joined.done():
            self._joined.set_result(None)
        error = event.error
        if event.state is LinkState.REFUSED and error is not None and error.reason is not Reason.SERVICE_UNAVAILABLE:
            self._fail(error)

    def _fail(self, error: WeftError) -> None:
        if self._joined.done():
            self.session.end(error)
        else:
            self._joined.set_exception(error)


class Publishers:
    """The registered publishers and their runners."""

    def __init__(self, parts: JoinParts) -> None:
        self.limits = PublisherLimits(max_sessions=parts.config.publishers.max_sessions)
        self._drain_seconds = parts.config.drain_seconds
        self._parts = parts
        self._clock = SystemClock()
        self._sockets = tempfile.TemporaryDirectory(prefix="weft-publishers-")
        """A private folder with a path short enough for sockets."""
        self._runners: dict[str, PublisherRunner] = {}
        """Runners by the hash of the session's secret."""
        self._tasks: dict[PublisherRunner, asyncio.Task[None]] = {}
        """Tasks that serve publishers until their sessions end."""
        self._opening = 0
        self._made = 0
        self._stopping = False

    async def drain(self, grace_seconds: float) -> None:
        """Drains all sessions within the grace and rejects new ones."""
        self._stopping = True
        await asyncio.gather(*(runner.drain(grace_seconds) for runner in list(self._runners.values())))
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def close(self) -> None:
        """Removes the folder of sockets. Call it when no registration is in progress."""
        self._sockets.cleanup()

    def session(self, secret: str) -> PublisherSession:
        """Returns a session by its secret. Raises SESSION_UNKNOWN, also while its runner is still leaving the mesh."""
        runner = self._runners.get(_hash(secret[:MAX_SECRET_CHARS]))
        if runner is None or runner.session.end_error is not None:
            raise WeftError(Reason.SESSION_UNKNOWN, "there is no such session, or it has ended; register again")
        return runner.session

    def leave(self, session: PublisherSession, grace_seconds: float) -> None:
        """Starts draining a publisher. Its session ends after its tasks."""
        runner = self._runners.get(_hash(session.secret))
        if runner is not None:
            start_task(runner.drain(min(grace_seconds, self._drain_seconds)), name="publisher-leaves")

    async def open(self, registration: Registration, *, token: str, peer: str, earlier_secret: str) -> PublisherSession:
        """Registers a publisher as a runner. Raises UNAUTHENTICATED, and the mesh's errors."""
        # The relay checks the token again; this check counts invalid ones by client address.
        # A publisher stores nothing but its token, so that its credential follows from it.
        await self._parts.relay.check_token(token, machine_credential(token), peer)
        await self._end_earlier(earlier_secret)
        await self._require_room()
        self._require_open()
        self._opening += 1
        try:
            return await self._open(registration, token, self._secret(earlier_secret))
        finally:
            self._opening -= 1

    async def _require_room(self) -> None:
        """Waits for publishers that are leaving if they are what exceeds the limit; raises TOO_MANY_RESOURCES."""
        while len(self._runners) + self._opening >= self.limits.max_sessions:
            leaving = [task for runner, task in self._tasks.items() if runner.session.end_error is not None]
            if not leaving:
                limit = f"{self.limits.max_sessions} publishers are registered, which is the limit"
                raise WeftError(Reason.TOO_MANY_RESOURCES, f"{limit} (publishers.max_sessions)")
            await asyncio.wait(leaving, return_when=asyncio.FIRST_COMPLETED)

    def _require_open(self) -> None:
        if self._stopping:
            raise WeftError(Reason.SHUTTING_DOWN, "the mesh is shutting down")

    async def _open(self, registration: Registration, token: str, secret: str) -> PublisherSession:
        session = PublisherSession(registration.name, secret, self.limits, self._clock)
        self._made += 1
        runner = PublisherRunner(
            session,
            self._runner_config(registration, session),
            own_address=f"unix:{self._sockets.name}/p{self._made}.sock",
            relay_address=self._parts.relay_listener.private_address,
            token=token,
        )
        try:
            await runner.start()
            self._require_open()
        except BaseException as error:
            await runner.stop(error if isinstance(error, WeftError) else WeftError(Reason.CANCELLED, "given up"))
            raise
        session.begin()
        self._runners[_hash(secret)] = runner
        self._tasks[runner] = start_task(self._serve(runner), name=f"publisher-{session.runner}")
        log.info("publisher registered", runner=session.runner, models=len(registration.models))
        return session

    async def _serve(self, runner: PublisherRunner) -> None:
        """Waits for the end of a publisher's session, then ends its runner."""
        session = runner.session
        try:
            await session.watch()
        finally:
            error = session.end_error or WeftError(Reason.SHUTTING_DOWN, "the mesh is shutting down")
            await runner.stop(error)
            if self._runners.get(_hash(session.secret)) is runner:
                del self._runners[_hash(session.secret)]
            self._tasks.pop(runner, None)
            log.info("publisher ended", runner=session.runner, reason=error.reason.name, message=error.message)

    async def _end_earlier(self, secret: str) -> None:
        """Ends the publisher's earlier session, if it still exists."""
        earlier = self._runners.get(_hash(secret)) if secret else None
        task = None if earlier is None else self._tasks.get(earlier)
        if earlier is not None and task is not None:
            earlier.session.end(WeftError(Reason.RESOURCE_CHANGED, "a newer registration has replaced this session"))
            await asyncio.wait({task})

    def _secret(self, earlier: str) -> str:
        """Returns the secret of a new session: the earlier one if its session id is known, to resume it."""
        if 0 < len(earlier) <= MAX_SECRET_CHARS and self._session_file(earlier).exists():
            return earlier
        return f"pub_{secrets.token_hex(SECRET_BYTES)}"

    def _session_file(self, secret: str) -> Path:
        return self._parts.home.state / "publishers" / f"{_hash(secret)}.session"

    def _runner_config(self, registration: Registration, session: PublisherSession) -> RunnerConfig:
        session_file = self._session_file(session.secret)
        self._forget_oldest(session_file.parent)
        settings = require_runtime(ATTACHED_RUNTIME).settings
        models: list[UpstreamSettings] = []
        for model in registration.models:
            given = {name: value for name, value in msgspec.structs.asdict(model).items() if value or name == "remote"}
            models.append(settings(url=NOWHERE, **given))
        section = RunnerSettings(name=registration.name, runtime=ATTACHED_RUNTIME, models=tuple(models))
        return RunnerConfig(
            name=registration.name,
            runtime=RUNTIME_NAME,
            # Publishers with the same host name count as one machine, so the default is unique.
            host=registration.host or registration.name,
            address="",
            registry_address="",
            session_file=session_file,
            models=tuple(self._served(section, model, session) for model in models),
            max_requests=registration.max_requests,
            requires_all=True,
            conceals_local_addresses=True,
        )

    def _served(self, section: RunnerSettings, model: UpstreamSettings, session: PublisherSession) -> ServedModel:
        # The session itself ends stalled tasks and reports them in its protocol.
        timeouts = TimeoutProfile(
            prefill_liveness_seconds=None, idle_stream_seconds=2 * self.limits.task_silence_seconds + 60
        )
        context = replace(runner_context(section), timeouts=timeouts, where=f"models.{model.name}")
        served = served_model(section, model, self._drain_seconds, context)
        parameters = section.engine.parameters
        return replace(served, make_backend=lambda: PublishedModel(model, context, parameters, session))

    def _forget_oldest(self, folder: Path) -> None:
        """Removes the oldest session ids of past publishers beyond the maximum; creates the folder."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        most = KEPT_IDS_PER_SESSION * self.limits.max_sessions
        with suppress(OSError):
            files = sorted(folder.glob("*.session"), key=lambda file: file.stat().st_mtime, reverse=True)
            for file in files[most:]:
                file.unlink(missing_ok=True)


def _hash(secret: str) -> str:
    """Returns the key under which a session is stored."""
    return sha256(secret.encode()).hexdigest()
