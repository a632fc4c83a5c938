"""Publishers of a mesh: each becomes a dial-out runner of this process, whose models the publisher serves over HTTP.

Such a runner joins as every dial-out runner does: with the publisher's own token, over the relay, within the relay's
limits. What is different is its backend alone, see `runner_svc.publishers`.
"""

import asyncio
import secrets
import shutil
import socket
import ssl
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
from typing_extensions import override

import runner_svc.service
from router_svc.relay import Relay
from runner_svc.config import RunnerConfig
from runner_svc.dial_out import DialOut, DialOutConfig, LinkEvent, LinkState
from runner_svc.instance.settings import ServedModel
from runner_svc.policy.timeouts import TimeoutProfile
from runner_svc.publishers.backend import PublishedModel
from runner_svc.publishers.engine_socket import EngineSocket
from runner_svc.publishers.http_api import PublisherApi, secret_hash
from runner_svc.publishers.messages import RegisteredModel, Registration
from runner_svc.publishers.session import PublisherSession
from runner_svc.runtimes.settings import UpstreamSettings
from runner_svc.runtimes.table import ATTACHED_RUNTIME, require_runtime
from runner_svc.settings import RunnerSettings
from weft.kernel.address import is_any_host
from weft.kernel.clock import Clock, SystemClock
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason
from weft.kernel.service import Service, start_task
from weft.link.link import LINK_CHANNEL_OPTIONS
from weft_app.compose.grpc_host import GrpcHost
from weft_app.compose.home import WeftHome, is_socket_address
from weft_app.compose.relay import RelayListener, relay_certificate, split_address
from weft_app.compose.served_models import runner_context, served_model
from weft_app.config.config import PublisherSettings, RelaySettings, WeftConfig

log = get_logger("weft.publishers")

RUNTIME_NAME = "http"
"""What `weft get runners` shows as the runtime of a publisher."""
SECRET_BYTES = 32
MAX_SECRET_CHARS = 256
KEPT_IDS_PER_SESSION = 4
"""Session ids of earlier publishers that are kept, by the most publishers at once."""
_LONGEST_NAME = "p9999999999.sock"


class PublisherRunner:
    """One publisher as a dial-out runner of this process. Life cycle: `start`, then `drain` or `stop`."""

    def __init__(
        self, session: PublisherSession, config: RunnerConfig, *, own_address: str, relay_address: str, token: str
    ) -> None:
        """`own_address`: the gRPC target of its own server. `relay_address`: the private one of the relay."""
        self.session = session
        self._joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._host = GrpcHost()
        address = self._host.bind(own_address)
        self._runner = runner_svc.service.build(replace(config, registry_address=address))

        async def open_channel() -> grpc.aio.Channel:
            return grpc.aio.insecure_channel(relay_address, options=LINK_CHANNEL_OPTIONS)

        link = DialOutConfig(
            target="the relay of this mesh", open_channel=open_channel, token=token, local_address=address
        )
        self._dial_out = DialOut(
            link,
            self._note,
            note_fresh_link=self._runner.reopen_session,
            note_mesh_time=self._runner.note_mesh_time,
        )

    async def start(self) -> None:
        """Joins. Returns once the mesh has the models; raises what refuses them."""
        await self._host.start([self._dial_out, self._runner])
        giving_up = asyncio.create_task(self._dial_out.given_up())
        try:
            waited: set[asyncio.Future[Any]] = {self._joined, giving_up}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if giving_up.done():
                raise giving_up.result()
            await self._joined
        finally:
            giving_up.cancel()

    async def run(self) -> None:
        """Returns once the publisher is lost, or dialing was given up."""
        watching = asyncio.create_task(self.session.watch())
        giving_up = asyncio.create_task(self._dial_out.given_up())
        try:
            await asyncio.wait({watching, giving_up}, return_when=asyncio.FIRST_COMPLETED)
            if giving_up.done():
                self.session.end(giving_up.result())
        finally:
            watching.cancel()
            giving_up.cancel()
            await asyncio.gather(watching, giving_up, return_exceptions=True)

    async def drain(self, grace_seconds: float) -> None:
        """Takes no new tasks, lets those that run end within their grace, and ends the session."""
        await self._host.stop(grace_seconds)
        self.session.end(WeftError(Reason.SHUTTING_DOWN, "the publisher has left the mesh"))

    async def stop(self, error: WeftError) -> None:
        """Ends the session, its tasks and its link at once. Idempotent."""
        self.session.end(error)
        # The link first: its loss tells the mesh at once that the runner is gone.
        await self._dial_out.stop(0.0)
        await self._host.stop(0.0)

    def _note(self, event: LinkEvent) -> None:
        if event.state is LinkState.JOINED and not self._joined.done():
            self._joined.set_result(None)
        error = event.error
        if event.state is not LinkState.REFUSED or error is None or error.reason is Reason.SERVICE_UNAVAILABLE:
            return
        if not self._joined.done():
            self._joined.set_exception(error)
        else:
            self.session.end(error)


class PublisherListener(Service):
    """The edge for publishers: its HTTP listener, and the runners of those that are registered."""

    service_names: Sequence[str] = ()

    def __init__(self, config: WeftConfig, home: WeftHome, relay: Relay, relay_listener: RelayListener) -> None:
        self._section: PublisherSettings = config.publishers
        self._relay_section: RelaySettings = config.relay
        self._drain_seconds = config.drain_seconds
        self._home = home
        self._relay = relay
        self._relay_listener = relay_listener
        self._clock: Clock = SystemClock()
        self._api = PublisherApi(self, self._section, self._clock)
        self._engine: EngineSocket | None = None
        self._folder = Path()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._runners: dict[str, PublisherRunner] = {}
        """By the hash of the session's secret."""
        self._opening = 0
        self._made = 0
        self._tasks: dict[PublisherRunner, asyncio.Task[None]] = {}
        """What serves each publisher until it has ended."""
        self._stopping = False
        self.url = ""
        """Where publishers register, once started."""

    @override
    def register(self, server: grpc.aio.Server) -> None:
        """Registers no gRPC service."""

    @override
    async def start(self) -> None:
        """Listens. Raises ALREADY_EXISTS when the address is taken, INVALID_ARGUMENT for invalid settings."""
        host, port = split_address(self._section.listen or "", "publishers.listen")
        tls = self._tls(host)
        self._folder = self._make_folder()
        self._engine = EngineSocket(self._folder / "models.sock")
        await self._engine.start()
        try:
            bound = await self._api.start(host, port, tls)
        except OSError as error:
            message = f"cannot listen on {self._section.listen} (publishers.listen): {error.strerror}"
            raise WeftError(Reason.ALREADY_EXISTS, message) from None
        shown = socket.gethostname() if is_any_host(host) else host
        shown = f"[{shown}]" if ":" in shown else shown
        self.url = f"{'http' if tls is None else 'https'}://{shown}:{bound}"
        log.info("listens", surface="publishers", url=self.url)

    @override
    async def stop(self, grace_seconds: float) -> None:
        """Ends every session, after its tasks within the grace, and stops listening."""
        self._stopping = True
        await asyncio.gather(*(self._leave(runner, grace_seconds) for runner in list(self._runners.values())))
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        # It cancels registrations that are under way, which leave nothing behind.
        await self._api.stop()
        if self._engine is not None:
            await self._engine.stop()
        if self._temporary is not None:
            self._temporary.cleanup()

    def session(self, secret: str) -> PublisherSession:
        """See `runner_svc.publishers.http_api.Publishers`."""
        runner = self._runners.get(secret_hash(secret[:MAX_SECRET_CHARS]))
        if runner is None:
            raise WeftError(Reason.SESSION_UNKNOWN, "there is no such session, or it has ended; register again")
        return runner.session

    def leave(self, session: PublisherSession, grace_seconds: float) -> None:
        """See `runner_svc.publishers.http_api.Publishers`."""
        runner = self._runners.get(secret_hash(session.secret))
        if runner is not None:
            start_task(self._leave(runner, min(grace_seconds, self._drain_seconds)), name="publisher-leaves")

    async def open(self, registration: Registration, *, token: str, peer: str, earlier_secret: str) -> PublisherSession:
        """See `runner_svc.publishers.http_api.Publishers`."""
        # The relay looks at the token again; here wrong ones are counted by the address of who shows them.
        await self._relay.check_token(token, peer)
        await self._end_earlier(earlier_secret)
        if self._stopping:
            raise WeftError(Reason.SHUTTING_DOWN, "the mesh is shutting down")
        if len(self._runners) + self._opening >= self._section.max_sessions:
            limit = f"{self._section.max_sessions} publishers are registered, which is the limit"
            raise WeftError(Reason.TOO_MANY_RESOURCES, f"{limit} (publishers.max_sessions)")
        self._opening += 1
        try:
            return await self._open(registration, token, self._secret(earlier_secret))
        finally:
            self._opening -= 1

    async def _open(self, registration: Registration, token: str, secret: str) -> PublisherSession:
        assert self._engine is not None, "a registration before the start"
        session = PublisherSession(registration.name, secret, self._section, self._clock)
        config = self._runner_config(registration, session, self._engine.add(session))
        self._made += 1
        runner = PublisherRunner(
            session,
            config,
            own_address=f"unix:{self._folder}/p{self._made}.sock",
            relay_address=self._relay_listener.private_address,
            token=token,
        )
        try:
            await runner.start()
        except BaseException as error:
            await runner.stop(error if isinstance(error, WeftError) else WeftError(Reason.CANCELLED, "given up"))
            self._engine.remove(session)
            raise
        session.begin()
        self._runners[secret_hash(secret)] = runner
        self._tasks[runner] = start_task(self._serve(runner), name=f"publisher-{session.runner}")
        log.info("publisher registered", runner=session.runner, models=len(registration.models))
        return session

    async def _serve(self, runner: PublisherRunner) -> None:
        """Keeps a publisher until its session has ended, and ends its runner."""
        session = runner.session
        try:
            await runner.run()
        finally:
            error = session.end_error or WeftError(Reason.SHUTTING_DOWN, "the mesh is shutting down")
            await runner.stop(error)
            if self._runners.get(secret_hash(session.secret)) is runner:
                del self._runners[secret_hash(session.secret)]
            if self._engine is not None:
                self._engine.remove(session)
            self._tasks.pop(runner, None)
            log.info("publisher ended", runner=session.runner, reason=error.reason.name, message=error.message)

    async def _leave(self, runner: PublisherRunner, grace_seconds: float) -> None:
        await runner.drain(grace_seconds)

    async def _end_earlier(self, secret: str) -> None:
        """Ends the session that a publisher had before, where it still stands."""
        earlier = self._runners.get(secret_hash(secret)) if secret else None
        task = None if earlier is None else self._tasks.get(earlier)
        if earlier is None or task is None:
            return
        earlier.session.end(WeftError(Reason.RESOURCE_CHANGED, "a newer registration has replaced this session"))
        await asyncio.wait({task})

    def _secret(self, earlier: str) -> str:
        """Returns the secret of a new session: the earlier one where its session id is known, so that it is resumed."""
        if 0 < len(earlier) <= MAX_SECRET_CHARS and self._session_file(earlier).exists():
            return earlier
        return f"pub_{secrets.token_hex(SECRET_BYTES)}"

    def _session_file(self, secret: str) -> Path:
        return self._home.state / "publishers" / f"{secret_hash(secret)}.session"

    def _runner_config(self, registration: Registration, session: PublisherSession, url: str) -> RunnerConfig:
        session_file = self._session_file(session.secret)
        self._forget_oldest(session_file.parent)
        timeouts = TimeoutProfile(
            # The session itself ends what stalls, and says so in the words of the protocol.
            prefill_liveness_seconds=None,
            idle_stream_seconds=2 * self._section.task_silence_seconds + 60,
        )
        models = tuple(_settings(model, url) for model in registration.models)
        section = RunnerSettings(
            name=registration.name, runtime=ATTACHED_RUNTIME, models=models, max_requests=registration.max_requests
        )
        return RunnerConfig(
            name=registration.name,
            runtime=RUNTIME_NAME,
            # Hosts that share a name count as one machine: without one, a publisher shares with nobody.
            host=registration.host or registration.name,
            address="",
            registry_address="",
            session_file=session_file,
            models=tuple(self._served(section, model, session, timeouts) for model in models),
            max_requests=registration.max_requests,
            conceals_local_addresses=True,
        )

    def _served(
        self, section: RunnerSettings, model: UpstreamSettings, session: PublisherSession, timeouts: TimeoutProfile
    ) -> ServedModel:
        assert self._engine is not None, "a registration before the start"
        socket_path, parameters = str(self._engine.path), section.engine.parameters
        context = replace(runner_context(section), timeouts=timeouts, where=f"models.{model.name}")
        served = served_model(section, model, self._drain_seconds, context)
        return replace(served, make_backend=lambda: PublishedModel(model, context, parameters, session, socket_path))

    def _forget_oldest(self, folder: Path) -> None:
        """Removes session ids of publishers that have not come back, beyond a number; makes the folder."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        most = KEPT_IDS_PER_SESSION * self._section.max_sessions
        with suppress(OSError):
            files = sorted(folder.glob("*.session"), key=lambda file: file.stat().st_mtime, reverse=True)
            for file in files[most:]:
                file.unlink(missing_ok=True)

    def _make_folder(self) -> Path:
        """Returns an empty private folder for sockets, whose paths are short enough."""
        folder = self._home.run / "publishers"
        if not is_socket_address(folder / _LONGEST_NAME):
            self._temporary = tempfile.TemporaryDirectory(prefix="weft-publishers-")
            return Path(self._temporary.name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)
        return folder

    def _tls(self, host: str) -> ssl.SSLContext | None:
        """Returns the relay's certificate as TLS of this listener; None on loopback where none is configured."""
        section = self._relay_section
        if relay_certificate(section, self._home, host) is None:
            return None
        own = self._home.state / "relay"
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        chain = own / "cert.pem" if section.certificate_file is None else section.certificate_file.expanduser()
        key = own / "key.pem" if section.key_file is None else section.key_file.expanduser()
        context.load_cert_chain(chain, key)
        return context


def _settings(model: RegisteredModel, url: str) -> UpstreamSettings:
    """Returns a model of a publisher as one of a server that runs already."""
    settings: UpstreamSettings = require_runtime(ATTACHED_RUNTIME).settings(
        name=model.name,
        url=url,
        pool=model.pool or None,
        operations=model.operations,
        slots=model.slots,
        context_tokens=model.context_tokens or None,
        skills=model.skills,
        remote=model.remote,
        upstream_model=model.upstream_model or None,
    )
    return settings
