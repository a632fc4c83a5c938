"""The dial-out link of a runner: one outbound stream for calls in both directions between the runner and the mesh."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from random import Random, SystemRandom
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import grpc
from typing_extensions import override

from runner_svc.policy.backoff import RedialLimits, RedialPolicy
from runner_svc.policy.joined_calls import require_callable
from runner_svc.redaction import redact_status
from weft.api.common.v1 import link_pb2
from weft.api.router.v1 import relay_service_pb2, relay_service_pb2_grpc
from weft.kernel.channels.rpc import CHANNEL_OPTIONS, answering, error_from_call
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import Service, start_critical, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import SystemClock
from weft.kernel.values.address import RUNNER_KEY
from weft.link.carried_calls import CarriedCalls
from weft.link.forward import Context, RawServices, finish, forward_to_channel, forward_to_link
from weft.link.frames import Side, error_of, forwardable, status_of
from weft.link.link import ACCEPTED_KEY, CLOCK_KEY, MACHINE_KEY, Link, LinkCall
from weft.link.multiplexer import LinkLimits

if TYPE_CHECKING:
    from weft.api.router.v1.relay_service_pb2_grpc import RelayServiceAsyncStub

log = get_logger("weft.dial_out")

REGISTRY_SERVICES = (
    "weft.api.registry.v1.RunnerSessionService",
    "weft.api.registry.v1.LeaseService",
    "weft.api.registry.v1.RegistryService",
)
"""Registry services called by the runner in this process."""
RUNNER_SERVICE = "weft.api.runner.v1.RunnerService"
"""The service of this runner; calls that name another one are forwarded to the mesh."""
CONNECT_SECONDS = 15.0
MAX_MESH_CALLS = 65_536
MAX_OWN_CALLS = 16
MAX_TIME_DIGITS = 14
"""Digits of milliseconds since the epoch, enough until the year 5138."""
_OTHER_PROTOCOLS = MappingProxyType(
    {
        "Failed parsing HTTP/2": "plain HTTP",
        "WRONG_VERSION_NUMBER": "plain HTTP",
        "missing selected ALPN": "HTTPS",
    }
)
"""What runs at an address that is not a relay, by words in gRPC's error."""
# gRPC's automatic flow-control window would buffer megabytes for a slow reader.
_LOCAL_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.http2.bdp_probe", 0))


class LinkState(Enum):
    """The state of a link."""

    CONNECTING = "connecting"
    JOINED = "joined"
    REFUSED = "refused"
    """The link is open, but the registry rejected the runner's session."""
    LEFT_OUT = "left out"
    """The runner has joined; `detail` names its models that the mesh does not serve, and is empty if it serves all."""
    LOST = "lost"
    GIVEN_UP = "given up"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEvent:
    """A change of the link's state."""

    state: LinkState
    detail: str = ""
    retry_seconds: float | None = None
    error: WeftError | None = None
    """Why the registry rejected the session; None: it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialOutConfig:
    """Configuration of a dial-out link."""

    target: str
    """The relay's address for display."""
    open_channel: Callable[[], Awaitable[grpc.aio.Channel]]
    """Opens a new channel to the relay for each attempt. Raises WeftError; PERMISSION_DENIED for a wrong identity."""
    token: str = field(repr=False)
    local_address: str
    """gRPC target of the runner's own server, which only this process connects to."""
    machine: str = field(default="", repr=False)
    """The machine's own credential, for which a token is exchanged at the first join; empty: none."""
    redial: RedialLimits = field(default_factory=RedialLimits)
    accepts_models: bool = False
    """Whether the mesh may add models of the hub to the runner."""


class DialOut(Service):
    """Keeps the link open, and serves the registry's services to the runner in the same process."""

    def __init__(
        self,
        config: DialOutConfig,
        on_event: Callable[[LinkEvent], None],
        *,
        carried: Callable[[], CarriedCalls | None] = lambda: None,
        note_fresh_link: Callable[[], None] = lambda: None,
        note_mesh_time: Callable[[datetime], None] = lambda _: None,
        random: Random | None = None,
    ) -> None:
        """`carried` returns the runner's calls of requests, which are answered here; others go to its own server.

        `note_fresh_link` makes the runner reopen its session immediately instead of at the next heartbeat.

        `note_mesh_time` is called with the mesh's time for each link.
        """
        self._config = config
        self._on_event = on_event
        self._carried = carried
        self._note_fresh_link = note_fresh_link
        self._note_mesh_time = note_mesh_time
        self._clock = SystemClock()
        self._random = random or SystemRandom()
        self._redial = RedialPolicy(self._clock.monotonic(), config.redial)
        self._local: grpc.aio.Channel | None = None
        self._link: Link | None = None
        self._session_is_open = False
        self._opened_at = 0.0
        self._was_joined = False
        self._task: asyncio.Task[None] | None = None
        self._given_up: asyncio.Future[WeftError] | None = None

    @override
    @property
    def service_names(self) -> tuple[str, ...]:
        return REGISTRY_SERVICES

    @override
    def register(self, server: grpc.aio.Server) -> None:
        services = RawServices(REGISTRY_SERVICES, self._serve_registry, keyed_names=(RUNNER_SERVICE,), key=RUNNER_KEY)
        server.add_generic_rpc_handlers((services,))

    async def start(self) -> None:
        """Starts dialing in the background. Returns immediately."""
        self._local = grpc.aio.insecure_channel(self._config.local_address, options=_LOCAL_OPTIONS)
        self._given_up = asyncio.get_running_loop().create_future()
        self._task = start_critical(self._keep_linked(), name="dial-out")
        self._task.add_done_callback(self._note_end)

    @override
    async def stop(self, grace_seconds: float) -> None:
        task, self._task = self._task, None
        if task is not None:
            await stop_tasks([task])
        local, self._local = self._local, None
        if local is not None:
            await local.close(grace=None)

    async def given_up(self) -> WeftError:
        """Waits until dialing is given up; returns the cause."""
        assert self._given_up is not None, "given_up before start"
        return await asyncio.shield(self._given_up)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """Reports a crash of the dialing task as given up, so that the command ends instead of idling."""
        if not task.cancelled() and task.exception() is not None and self._given_up is not None:
            self._given_up.set_result(WeftError(Reason.INTERNAL, "connecting to the mesh failed; see the log"))

    async def _keep_linked(self) -> None:
        while True:
            self._on_event(LinkEvent(state=LinkState.CONNECTING))
            error = await self._link_once()
            if self._is_hopeless(error):
                self._on_event(LinkEvent(state=LinkState.GIVEN_UP, detail=error.message))
                assert self._given_up is not None, "running before start"
                self._given_up.set_result(error)
                return
            self._note_session_end(error)
            pause = self._redial.failed(self._random.random(), self._clock.monotonic())
            log.warning("link lost", reason=error.reason.name, message=error.message, retry_seconds=round(pause, 2))
            self._on_event(LinkEvent(state=LinkState.LOST, detail=error.message, retry_seconds=pause))
            await self._clock.sleep(pause)

    def _is_hopeless(self, error: WeftError) -> bool:
        if error.reason is Reason.UNAUTHENTICATED:
            return True
        # After the first link, a captive portal or a proxy may be the cause; before it, an option is wrong.
        return error.reason in (Reason.PERMISSION_DENIED, Reason.UNSUPPORTED_OPERATION) and not self._was_joined

    async def _link_once(self) -> WeftError:
        """Dials and serves the link until it ends. Returns the cause."""
        try:
            channel = await self._config.open_channel()
        except WeftError as error:
            return error
        try:
            stub = cast("RelayServiceAsyncStub", relay_service_pb2_grpc.RelayServiceStub(channel))
            config = self._config
            machine = ((MACHINE_KEY, config.machine),) if config.machine else ()
            call = stub.Attach(metadata=(("authorization", f"Bearer {config.token}"), *machine))
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    answer = await _accepted(call)
            except TimeoutError:
                return WeftError(Reason.CONNECT_FAILED, f"{self._config.target} does not answer")
            except grpc.aio.AioRpcError as error:
                return self._connect_error(error)
            if (now := _mesh_time(answer)) is not None:
                self._note_mesh_time(now)
            await self._carry(call)
        except WeftError as error:
            return error
        finally:
            await channel.close(grace=None)
        return WeftError(Reason.SERVICE_UNAVAILABLE, "the mesh ended the link")

    async def _carry(self, stream: Any) -> None:
        limits = LinkLimits(max_own_calls=MAX_OWN_CALLS, max_peer_calls=MAX_MESH_CALLS)
        self._link, self._session_is_open = Link(Side.RUNNER, limits, self._answer), False
        self._note_fresh_link()
        try:
            await self._link.run(stream, relay_service_pb2.AttachRequest)
        finally:
            self._link = None

    def _note_session_end(self, error: WeftError) -> None:
        """Tells the redial policy that a session over the link has ended."""
        if self._session_is_open:
            now = self._clock.monotonic()
            self._redial.ended(now - self._opened_at, now, replaced=error.reason is Reason.WORKER_LOST)
        self._session_is_open = False

    def _connect_error(self, error: grpc.aio.AioRpcError) -> WeftError:
        found = error_from_call(error, Reason.CONNECT_FAILED)
        if found.reason is Reason.UNSUPPORTED_OPERATION:
            return WeftError(
                found.reason, f"there is no relay at {self._config.target}; ask for the address where runners join"
            )
        if found.reason is not Reason.CONNECT_FAILED:
            return found
        details = error.details() or ""
        if "certificate is not yet valid" in details or "certificate has expired" in details:
            # The clock may be corrected later, so dialing continues.
            return WeftError(
                Reason.CONNECT_FAILED,
                f"the certificate of {self._config.target} is not valid now; check this machine's clock",
            )
        if "CERTIFICATE_VERIFY_FAILED" in details or "Peer name" in details:
            return WeftError(
                Reason.PERMISSION_DENIED,
                f"the certificate of {self._config.target} is not trusted; give --ca-file or --fingerprint",
            )
        protocol = next((each for words, each in _OTHER_PROTOCOLS.items() if words in details), "")
        return (
            speaks_no_grpc(self._config.target, protocol)
            if protocol
            else WeftError(Reason.CONNECT_FAILED, f"{self._config.target} cannot be reached")
        )

    async def _answer(self, call: LinkCall) -> link_pb2.CallEnd:
        require_callable(call.start.method, accepts_models=self._config.accepts_models)
        carried = self._carried()
        if carried is not None and carried.serves(call.start.method):
            try:
                return await carried.answer(call)
            except WeftError as error:
                return redact_status(status_of(error))
        assert self._local is not None, "a call before start"
        return redact_status(await forward_to_channel(call, self._local))

    async def _serve_registry(self, method: str, request: bytes, context: Context) -> None:
        async with answering(context):
            link, name = self._link, method.rpartition("/")[2]
            if link is None:
                raise WeftError(Reason.SERVICE_UNAVAILABLE, "there is no link to the mesh")
            if name != "OpenSession" and not self._session_is_open:
                # The relay has no session for a new link yet, and its address may have changed.
                raise WeftError(Reason.SESSION_UNKNOWN, "the link was re-established; open the session again")
            metadata = forwardable(cast("Any", context.invocation_metadata()))
            status = await forward_to_link(link, method, metadata, request, context)
            if link is not self._link:
                raise WeftError(Reason.SERVICE_UNAVAILABLE, "the link to the mesh was lost")
            if name == "OpenSession":
                self._note_opening(status)
            await finish(context, status)

    def _note_opening(self, status: link_pb2.CallEnd) -> None:
        if status.code != 0:
            self._on_event(LinkEvent(state=LinkState.REFUSED, detail=status.message, error=error_of(status)))
            return
        if not self._session_is_open:
            self._opened_at = self._clock.monotonic()
        self._session_is_open = self._was_joined = True
        self._on_event(LinkEvent(state=LinkState.JOINED))


def speaks_no_grpc(target: str, protocol: str) -> WeftError:
    """Returns the error for an address where something other than a relay answers, such as the mesh's HTTP port."""
    return WeftError(
        Reason.CONNECT_FAILED,
        f"{target} is reachable, but uses {protocol} instead of gRPC, as the HTTP port of a mesh does; runners join at "
        "the port of its relay (weft up --join-port), which weft up shows in its line `runners`",
    )


async def _accepted(call: Any) -> dict[str, str | bytes]:
    """Returns the metadata of the relay's acceptance. Raises AioRpcError if it rejects or cannot be reached."""
    answer = dict(await call.initial_metadata() or ())
    if ACCEPTED_KEY not in answer:
        # Reading raises the status of a rejection, which may arrive before or with it.
        await call.read()
        raise WeftError(
            Reason.UNSUPPORTED_OPERATION,
            "the server at this address is not a relay; ask for the address where runners join",
        )
    return answer


def _mesh_time(answer: dict[str, str | bytes]) -> datetime | None:
    milliseconds = str(answer.get(CLOCK_KEY, ""))
    if not (milliseconds.isascii() and milliseconds.isdigit() and len(milliseconds) <= MAX_TIME_DIGITS):
        return None
    return datetime.fromtimestamp(int(milliseconds) / 1000, UTC)
