"""The relay for dial-out runners: their links by runner name, and their services over these links."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any, cast

import grpc

from router_svc.policy.token_refusals import TokenRefusals
from router_svc.relay_models import ModelCalls
from router_svc.relay_sessions import LinkSession, SessionCalls
from router_svc.router_config import RelayConfig
from weft.api.common.v1 import link_pb2
from weft.api.operations.v1 import process_service_pb2
from weft.api.registry.v1 import join_token_service_pb2, join_token_service_pb2_grpc, registry_service_pb2
from weft.api.router.v1 import relay_service_pb2
from weft.api.runner.v1 import runner_service_pb2
from weft.dispatch.operation_table import OPERATIONS
from weft.kernel.access.rpc_auth import API_KEY, AUTHORIZATION
from weft.kernel.channels.rpc import ChannelPool, answering, calling
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock, wait_for_event
from weft.kernel.values.address import RUNNER_KEY
from weft.link.forward import Context, RawServices, finish, forward_call, forward_to_link
from weft.link.frames import Metadata, Side, forwardable
from weft.link.link import ACCEPTED_KEY, CLOCK_KEY, MACHINE_KEY, Link, LinkCall
from weft.link.multiplexer import LinkLimits, UnreadShare

if TYPE_CHECKING:
    from weft.api.registry.v1.join_token_service_pb2_grpc import JoinTokenServiceAsyncStub


CHECK_SECONDS = 5.0
MAX_CHECKS = 64
"""Maximum concurrent token checks."""
MAX_TOKEN_CHARS = 512
MAX_KNOWN_TOKENS = 4096


class TokenGate:
    """Checks tokens. Previously valid ones are always checked, however many wrong ones arrive meanwhile."""

    def __init__(self, registry: grpc.aio.Channel, clock: Clock) -> None:
        self._tokens = cast("JoinTokenServiceAsyncStub", join_token_service_pb2_grpc.JoinTokenServiceStub(registry))
        self._clock = clock
        self._refusals = TokenRefusals()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        """Hashes of tokens that were valid when last used."""
        self._checking = 0

    async def check(self, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        """Return the id of the caller's token.

        Raises UNAUTHENTICATED if not, RATE_LIMIT_EXCEEDED after too many wrong ones, SERVICE_UNAVAILABLE if the
        registry is unreachable.
        """
        given = context.invocation_metadata() or ()
        machine = next((str(value) for key, value in given if key == MACHINE_KEY), "")
        return await self.check_token(_token_of(given), machine, context.peer().rpartition(":")[0])

    async def check_token(self, token: str, machine: str, peer: str) -> str:
        """Return the id of a valid machine or token; wrong ones are counted by peer. Raises as `check`."""
        if not 0 < len(token) <= MAX_TOKEN_CHARS or len(machine) > MAX_TOKEN_CHARS:
            raise _no_token()
        digest = sha256(token.encode()).digest()
        wait = 0.0 if digest in self._known else self._refusals.wait_seconds(peer, self._clock.monotonic())
        if wait > 0 or self._checking >= MAX_CHECKS:
            raise WeftError(
                Reason.RATE_LIMIT_EXCEEDED, "too many join tokens are being tried", retry_after_seconds=max(wait, 1.0)
            )
        self._checking += 1
        try:
            token_id = await self._call_registry(token, machine)
        except WeftError as error:
            if error.reason is Reason.UNAUTHENTICATED:
                self._known.pop(digest, None)
                self._refusals.refused(peer, self._clock.monotonic())
            raise
        finally:
            self._checking -= 1
        self._remember(digest)
        return token_id

    async def _call_registry(self, token: str, machine: str) -> str:
        try:
            request = join_token_service_pb2.CheckJoinTokenRequest(token=token, machine=machine)
            with calling(Reason.SERVICE_UNAVAILABLE):
                checked = await self._tokens.CheckJoinToken(request, timeout=CHECK_SECONDS)
        except WeftError as error:
            raise _check_error(error) from None
        return checked.join_token.id

    def _remember(self, digest: bytes) -> None:
        self._known[digest] = None
        self._known.move_to_end(digest)
        while len(self._known) > MAX_KNOWN_TOKENS:
            self._known.popitem(last=False)


def _token_of(metadata: Iterable[Any]) -> str:
    given = [value for key, value in metadata if key == "authorization"]
    scheme, _, token = str(given[0]).partition(" ") if len(given) == 1 else ("", "", "")
    if scheme.lower() != "bearer" or not 0 < len(token) <= MAX_TOKEN_CHARS:
        raise _no_token()
    return token


def _no_token() -> WeftError:
    return WeftError(Reason.UNAUTHENTICATED, "a join token is required; create one with `weft runner token create`")


def _check_error(error: WeftError) -> WeftError:
    if error.reason is Reason.UNAUTHENTICATED:
        return WeftError(
            Reason.UNAUTHENTICATED,
            "the join token is not valid, or another machine used it; create another: weft runner token create",
        )
    return WeftError(Reason.SERVICE_UNAVAILABLE, "the token cannot be checked now, because the registry is away")


log = get_logger("weft.relay")

MAX_UNREAD_BYTES = 1024**3
"""Maximum bytes that wait for slow callers, over all links."""
RECHECK_SECONDS = 30.0
"""Interval in which the credential of a link is checked if the mesh does not have its runner."""
MAX_RUNNER_CALLS = 16
"""Maximum concurrent calls of a runner to the registry."""
_NOT_FOR_RUNNERS = frozenset({RUNNER_KEY, AUTHORIZATION, API_KEY})
"""Metadata that is not forwarded: a gateway's key gives access to the whole mesh, and joined runners need not be
trusted."""
RELAY_SERVICE = relay_service_pb2.DESCRIPTOR.services_by_name["RelayService"].full_name
RELAYED_SERVICES = (runner_service_pb2.DESCRIPTOR.services_by_name["RunnerService"].full_name,)
"""Calls that belong to no request; those of requests come on streams, see `Relay.forward`."""
PROCESS_SERVICE = process_service_pb2.DESCRIPTOR.services_by_name["ProcessService"].full_name
"""Also a service of the router itself; a call that names a runner is forwarded to it."""
_LIST = "/weft.api.registry.v1.RegistryService/ListResources"
_FIND, _READ = (f"/weft.api.runner.v1.RunnerService/{name}" for name in ("FindStoredModel", "ReadModelFile"))
_MODEL_METHODS = frozenset(spec.runner_rpc.path for spec in OPERATIONS.values())
_WORK_METHODS = frozenset(spec.runner_rpc.path for spec in OPERATIONS.values() if spec.takes_slot)

AttachRequests = AsyncIterator[relay_service_pb2.AttachRequest]
AttachContext = grpc.aio.ServicerContext[relay_service_pb2.AttachRequest, relay_service_pb2.AttachResponse]


class RelayLink:
    """An open link and the session that its runner opened over it."""

    def __init__(self, config: RelayConfig, session: LinkSession, calls: SessionCalls, share: UnreadShare) -> None:
        limits = LinkLimits(max_own_calls=config.max_calls_per_link, max_peer_calls=MAX_RUNNER_CALLS)
        self.session = session
        self.link = Link(Side.ROUTER, limits, lambda call: calls.answer(call, session), share)
        session.revoke = self.link.stop
        self.ended = asyncio.Event()
        self._working = 0
        self._running = 0
        """Model calls that are being forwarded."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_idle(self) -> bool:
        """Whether no model call is being forwarded."""
        return self._idle.is_set()

    async def until_idle(self) -> None:
        """Waits until no model call is being forwarded."""
        await self._idle.wait()

    async def serve(self, method: str, request: bytes, context: Context) -> None:
        """Forward a gRPC call to the runner."""
        metadata = _for_runners(forwardable(cast("Any", context.invocation_metadata())))
        await finish(context, await forward_to_link(self.link, method, metadata, request, context))

    async def carry(self, call: LinkCall, metadata: Metadata) -> link_pb2.CallEnd:
        """Forward a model call to the runner.

        Raises NO_SLOT_AVAILABLE if the runner is at its maximum number of requests, SHUTTING_DOWN while the relay
        drains.
        """
        if self.session.is_draining:
            raise _shutting_down()
        limit, is_work = self.session.max_requests, call.start.method in _WORK_METHODS
        if is_work and 0 < limit <= self._working:
            raise WeftError(
                Reason.NO_SLOT_AVAILABLE, f"{self.session.runner} is processing {limit} requests, which is its limit"
            )
        self._running += 1
        self._working += is_work
        self._idle.clear()
        try:
            return await forward_call(call, self.link, _for_runners(metadata))
        finally:
            self._running -= 1
            self._working -= is_work
            if not self._running:
                self._idle.set()


def _for_runners(metadata: Metadata) -> Metadata:
    return tuple(entry for entry in metadata if entry[0] not in _NOT_FOR_RUNNERS)


class Relay:
    """Accepts links and serves the runners behind them. Life cycle: `start`, `stop`."""

    def __init__(self, config: RelayConfig, clock: Clock, channels: ChannelPool | None = None) -> None:
        """`channels` to the mesh's runners, from which joined ones copy model files; None: they copy none."""
        self._config = config
        self._clock = clock
        self._channels = channels
        self._share = UnreadShare(MAX_UNREAD_BYTES)
        self._links: dict[str, RelayLink] = {}
        self._standing: dict[LinkSession, RelayLink] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._calls: SessionCalls | None = None
        self._gate: TokenGate | None = None
        self._stopping = False

    def start(self, registry: grpc.aio.Channel) -> None:
        """Start accepting links."""
        self._calls = SessionCalls(registry, self._config.address, self._bind)
        if self._channels is not None:
            models = ModelCalls(registry, self._channels)
            self._calls.serve(_LIST, registry_service_pb2.ListResourcesRequest, models.list_runners)
            self._calls.serve(_FIND, runner_service_pb2.FindStoredModelRequest, models.find)
            self._calls.serve(_READ, runner_service_pb2.ReadModelFileRequest, models.read)
        self._gate = TokenGate(registry, self._clock)
        self._stopping = False

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new links and requests, and end each link after its requests or after the grace period.

        Idempotent: a call with a shorter grace period shortens a stop under way.
        """
        self._stopping = True
        standing = list(self._standing.values())
        if standing and grace_seconds > 0:
            await self._drain(standing, grace_seconds)
        for each in standing:
            each.link.stop(_shutting_down())
        for each in standing:
            await each.ended.wait()
        if self._calls is not None:
            await self._calls.settle()
        await asyncio.gather(*self._closing)

    async def _drain(self, standing: list[RelayLink], grace_seconds: float) -> None:
        busy = sum(not each.is_idle for each in standing)
        if busy:
            log.info("waits for requests of joined runners", runners=busy, grace_seconds=grace_seconds)
        drained = asyncio.create_task(self._drain_links(standing))
        late = asyncio.create_task(self._clock.sleep(grace_seconds))
        try:
            await asyncio.wait({drained, late}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await stop_tasks([late, drained])

    async def _drain_links(self, standing: list[RelayLink]) -> None:
        async with asyncio.TaskGroup() as draining:
            for each in standing:
                draining.create_task(self._drain_link(each))

    async def _drain_link(self, standing: RelayLink) -> None:
        """End a link once it has no requests, so that its runner can dial another relay while others still drain."""
        standing.session.is_draining = True
        if not standing.is_idle and self._calls is not None:
            # Otherwise requests would be placed here, and refused, until the runner's next heartbeat.
            with suppress(WeftError):
                await self._calls.report_draining(standing.session)
        await standing.until_idle()
        standing.link.stop(_shutting_down())

    async def check_token(self, token: str, machine: str, peer: str) -> None:
        """Return if a join token or machine is valid, for a listener that opens links for others.

        `peer`: who presents it. Raises as `TokenGate.check`, and SHUTTING_DOWN.
        """
        self._require_running()
        assert self._gate is not None, "a token before the relay was started"
        await self._gate.check_token(token, machine, f"publisher:{peer}")

    def services(self) -> RawServices:
        """Return the runners' services, for the router's gRPC server."""
        return RawServices(RELAYED_SERVICES, self._serve, keyed_names=(PROCESS_SERVICE,), key=RUNNER_KEY)

    async def attach(self, context: AttachContext) -> None:
        """Serve a link until it ends. Raises the error that ended it, see RelayService.Attach."""
        self._require_running()
        assert self._gate is not None, "a link before the relay was started"
        session = LinkSession(joined_by=await self._gate.check(context))
        standing = RelayLink(self._config, session, self._require_room(), self._share)
        # Once registered it counts, and `stop` ends it.
        self._standing[standing.session] = standing
        watching = asyncio.create_task(self._watch_session(standing, context))
        try:
            milliseconds = int(self._clock.utc_now().timestamp() * 1000)
            await context.send_initial_metadata(((ACCEPTED_KEY, "1"), (CLOCK_KEY, str(milliseconds))))
            await standing.link.run(context, relay_service_pb2.AttachResponse)
        finally:
            del self._standing[standing.session]
            self._unbind(standing)
            standing.ended.set()
            await stop_tasks([watching])

    def _require_room(self) -> SessionCalls:
        self._require_running()
        assert self._calls is not None, "a link before the relay was started"
        if len(self._standing) >= self._config.max_links:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES, f"{self._config.max_links} runners are joined here, which is the limit"
            )
        return self._calls

    def _require_running(self) -> None:
        if self._stopping or self._calls is None:
            raise _shutting_down()

    async def _watch_session(self, standing: RelayLink, context: AttachContext) -> None:
        """End a link if its runner does not open a session in time, or once its machine was revoked."""
        seconds, session = self._config.open_timeout_seconds, standing.session
        if not await wait_for_event(session.opened, self._clock, seconds):
            message = f"the runner opened no session within {seconds:g} s"
            standing.link.stop(session.refusal or WeftError(Reason.DEADLINE_EXCEEDED, message))
            return
        while self._calls is not None and self._gate is not None:
            await self._clock.sleep(RECHECK_SECONDS)
            # A revoked runner that sends no heartbeats would otherwise keep its link.
            try:
                if not await self._calls.is_known(session):
                    await self._gate.check(context)
            except WeftError as error:
                if error.reason is Reason.UNAUTHENTICATED:
                    standing.link.stop(error)

    def _bind(self, session: LinkSession) -> None:
        standing = self._standing.get(session)
        if standing is None:
            # The link was lost while the registry opened the session.
            self._start_closing(session)
            return
        older = self._links.get(session.runner)
        self._links[session.runner] = standing
        log.info("runner joined", runner=session.runner)
        if older is not None and older is not standing:
            older.link.stop(WeftError(Reason.WORKER_LOST, "a newer link of the same runner has replaced this one"))

    def _unbind(self, standing: RelayLink) -> None:
        session = standing.session
        if self._links.get(session.runner) is not standing:
            return
        del self._links[session.runner]
        log.warning("link lost", runner=session.runner)
        self._start_closing(session)

    def _start_closing(self, session: LinkSession) -> None:
        if session.session_id and self._calls is not None:
            closing = asyncio.create_task(self._close_session(self._calls, session))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _close_session(self, calls: SessionCalls, session: LinkSession) -> None:
        """Report immediately that the runner is gone, unless it has reconnected."""
        async with calls.turn(session.runner):
            if session.runner not in self._links:
                with suppress(WeftError):
                    await calls.close(session)

    async def forward(self, call: LinkCall, metadata: Metadata) -> link_pb2.CallEnd | None:
        """Forward a model call on a stream to the runner that its metadata names; None: it is no model call.

        Raises INVALID_ARGUMENT without one name, RUNNER_UNREACHABLE, and as `RelayLink.carry`.
        """
        if call.start.method not in _MODEL_METHODS:
            return None
        return await (await self._find(metadata)).carry(call, metadata)

    async def _serve(self, method: str, request: bytes, context: Context) -> None:
        async with answering(context):
            standing = await self._find(cast("Any", context.invocation_metadata()) or ())
            await standing.serve(method, request, context)

    async def _find(self, metadata: Metadata) -> RelayLink:
        named = [value for key, value in metadata if key == RUNNER_KEY]
        runner = str(named[0]) if len(named) == 1 else ""
        if not runner:
            raise invalid_field(f"metadata {RUNNER_KEY}", "must name the runner once, as its address says")
        standing = self._links.get(runner)
        if standing is None and self._calls is not None:
            # The registry may report a new session shortly before its link is registered here.
            async with self._calls.turn(runner):
                standing = self._links.get(runner)
        if standing is None:
            raise WeftError(Reason.RUNNER_UNREACHABLE, "no link to this runner", metadata={"runner": runner[:128]})
        return standing


def _shutting_down() -> WeftError:
    return WeftError(Reason.SHUTTING_DOWN, "the router is shutting down")


def add_relay_to_server(relay: Relay, server: grpc.aio.Server) -> None:
    """Add RelayService to a server. The generated base class has no handler that reads and writes."""

    async def attach(requests: AttachRequests, context: AttachContext) -> None:  # noqa: ARG001 - read by the context
        async with answering(context):
            await relay.attach(context)

    handler: Any = grpc.stream_stream_rpc_method_handler(
        attach,
        request_deserializer=relay_service_pb2.AttachRequest.FromString,
        response_serializer=relay_service_pb2.AttachResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(RELAY_SERVICE, {"Attach": handler}),))
