"""Calls of dial-out runners to the registry: allowed ones are forwarded for that runner only."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import grpc
from google.protobuf.message import DecodeError, Message

from weft.api.common.v1.link_pb2 import CallEnd
from weft.api.registry.v1 import (
    lease_pb2,
    lease_service_pb2,
    lease_service_pb2_grpc,
    registry_service_pb2,
    registry_service_pb2_grpc,
    runner_pb2,
    runner_session_service_pb2_grpc,
)
from weft.api.registry.v1 import runner_session_service_pb2 as pb
from weft.kernel.channels.rpc import calling, error_from_call
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.address import relayed_address
from weft.kernel.values.names import require_name
from weft.link.link import LinkCall

if TYPE_CHECKING:
    from weft.api.registry.v1.lease_service_pb2_grpc import LeaseServiceAsyncStub
    from weft.api.registry.v1.registry_service_pb2_grpc import RegistryServiceAsyncStub
    from weft.api.registry.v1.runner_session_service_pb2_grpc import RunnerSessionServiceAsyncStub


@dataclass(eq=False, slots=True, kw_only=True)
class LinkSession:
    """The session opened over a link."""

    joined_by: str = ""
    """Id of the join token that opened the link."""
    runner: str = ""
    """Owner of the link: the first name that a session was requested for, even if it was not opened."""
    session_id: str = ""
    incarnation: str = ""
    host: str = ""
    max_requests: int = 0
    """Maximum concurrent requests of the runner; 0: no separate limit."""
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    opening: asyncio.Task[Message] | None = None
    """Set while the registry is opening it."""
    opening_request_id: str = ""
    """Request id with which the runner opens it."""
    refusal: WeftError | None = None
    """The error of the last attempt to open it."""
    revoke: Callable[[WeftError], None] = lambda _: None
    """Ends the link if its machine was revoked."""
    is_draining: bool = False
    """Whether its relay is about to end the link; the mesh then sees the runner as draining."""
    last_beat: pb.HeartbeatRequest | None = None
    """The runner's newest heartbeat over the link."""


def require_own(session: LinkSession, session_id: str) -> None:
    """Raise PERMISSION_DENIED unless the session was opened over this link."""
    if not session.session_id or session_id != session.session_id:
        raise WeftError(Reason.PERMISSION_DENIED, "this is not the session that was opened over this link")


CALL_TIMEOUT_SECONDS = 5.0
_SESSIONS = "/weft.api.registry.v1.RunnerSessionService/"
_LEASES = "/weft.api.registry.v1.LeaseService/"

Serve = Callable[[LinkCall, LinkSession, Any], Awaitable[Message | None]]
"""Serves a request; returns the response, or None if it has sent its responses."""


class SessionCalls:
    """Answers calls of runners to the registry, each for its own session and leases only."""

    def __init__(self, registry: grpc.aio.Channel, address: str, note_open: Callable[[LinkSession], None]) -> None:
        """`address`: the router's own gRPC target. `note_open`: called for a session before its runner is answered."""
        self._address = address
        self._note_open = note_open
        self._sessions = cast(
            "RunnerSessionServiceAsyncStub", runner_session_service_pb2_grpc.RunnerSessionServiceStub(registry)
        )
        self._registry = cast("RegistryServiceAsyncStub", registry_service_pb2_grpc.RegistryServiceStub(registry))
        self._leases = cast("LeaseServiceAsyncStub", lease_service_pb2_grpc.LeaseServiceStub(registry))
        self._openings: set[asyncio.Task[Message]] = set()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._methods: dict[str, tuple[type[Message], Serve]] = {
            f"{_SESSIONS}OpenSession": (pb.OpenSessionRequest, self._open),
            f"{_SESSIONS}Heartbeat": (pb.HeartbeatRequest, self._heartbeat),
            f"{_SESSIONS}CloseSession": (pb.CloseSessionRequest, self._close),
            f"{_LEASES}AcquireLease": (lease_service_pb2.AcquireLeaseRequest, self._acquire),
            f"{_LEASES}RenewLeases": (lease_service_pb2.RenewLeasesRequest, self._renew),
            f"{_LEASES}ReleaseLease": (
                lease_service_pb2.ReleaseLeaseRequest,
                partial(self._release, self._leases.ReleaseLease),
            ),
            f"{_LEASES}ReleaseEarlierLives": (
                lease_service_pb2.ReleaseEarlierLivesRequest,
                partial(self._release, self._leases.ReleaseEarlierLives),
            ),
        }

    def serve(self, method: str, request: type[Message], serve: Serve) -> None:
        """Answers calls of another method, too."""
        self._methods[method] = request, serve

    def turn(self, runner: str) -> asyncio.Lock:
        """Return the lock for opening and closing a runner's session: a late close must not hit the next session."""
        lock = self._turns.get(runner)
        if lock is None:
            lock = self._turns[runner] = asyncio.Lock()
        return lock

    async def answer(self, call: LinkCall, session: LinkSession) -> CallEnd:
        """Answer a call of a runner. See weft.link.link.Answer."""
        known = self._methods.get(call.start.method)
        if known is None:
            raise WeftError(Reason.UNSUPPORTED_OPERATION, "a link may only call what a runner needs")
        data = await call.read()
        if data is None:
            raise WeftError(Reason.MALFORMED_REQUEST, "the call had no request")
        kind, serve = known
        try:
            response = await serve(call, session, kind.FromString(data))
        except DecodeError:
            raise WeftError(Reason.MALFORMED_REQUEST, "the request cannot be read") from None
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error
        if response is not None:
            await call.send(response.SerializeToString())
        return CallEnd()

    async def report_draining(self, session: LinkSession) -> None:
        """Report immediately that a runner is draining. Raises WeftError.

        Before its first heartbeat the runner reports it itself. The heartbeat has the runner's next number, so that the
        runner's own heartbeat with that number counts as a repeat and not as stale.
        """
        if session.last_beat is None:
            return
        beat = pb.HeartbeatRequest()
        beat.CopyFrom(session.last_beat)
        beat.sequence += 1
        beat.capability.draining = True
        with calling(Reason.SERVICE_UNAVAILABLE):
            await self._sessions.Heartbeat(beat, timeout=CALL_TIMEOUT_SECONDS)

    async def settle(self) -> None:
        """Wait until no session is being opened."""
        await asyncio.gather(*self._openings, return_exceptions=True)

    async def close(self, session: LinkSession) -> None:
        """Close the session of a runner that lost its link, unless it is reachable elsewhere. Raises WeftError."""
        with calling(Reason.SERVICE_UNAVAILABLE):
            known = await self._known(session)
            if known.address == relayed_address(self._address, session.runner):
                await self._sessions.CloseSession(_close_request(session), timeout=CALL_TIMEOUT_SECONDS)

    async def is_known(self, session: LinkSession) -> bool:
        """Return whether the mesh has the runner, joined by this link's token or machine. Raises WeftError."""
        try:
            with calling(Reason.SERVICE_UNAVAILABLE):
                return (await self._known(session)).joined_by == session.joined_by
        except WeftError as error:
            if error.reason is Reason.NOT_FOUND:
                return False
            raise

    async def _known(self, session: LinkSession) -> runner_pb2.Runner:
        request = registry_service_pb2.GetResourceRequest(kind="runner", name=session.runner)
        found = await self._registry.GetResource(request, timeout=CALL_TIMEOUT_SECONDS)
        known = runner_pb2.Runner()
        found.resource.content.Unpack(known)
        return known

    async def _open(self, _: LinkCall, session: LinkSession, request: pb.OpenSessionRequest) -> Message:
        name = require_name(request.runner.name, "runner.name")
        if session.runner and session.runner != name:
            raise WeftError(Reason.PERMISSION_DENIED, f"this link belongs to {session.runner}")
        if session.opening is not None:
            # An opening outlives its call. Only one at a time is allowed, to bound their number.
            if request.request_id and request.request_id == session.opening_request_id:
                return await asyncio.shield(session.opening)
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the session is being opened already; try again")
        session.runner, session.opening_request_id = name, request.request_id
        # The runner's own address is irrelevant, as the mesh reaches it through this router.
        request.runner.address = relayed_address(self._address, name)
        request.runner.dial_out = True
        request.runner.joined_by = session.joined_by
        request.runner.capability.draining |= session.is_draining
        # Losing the link does not cancel this: the registry may have opened the session, which must then be closed.
        opening = session.opening = asyncio.create_task(self._open_in_turn(session, request))
        self._openings.add(opening)
        opening.add_done_callback(self._forget_opening)
        return await asyncio.shield(opening)

    def _forget_opening(self, opening: asyncio.Task[Message]) -> None:
        self._openings.discard(opening)
        if not opening.cancelled():
            # Retrieve the exception, which asyncio would otherwise report.
            opening.exception()

    async def _open_in_turn(self, session: LinkSession, request: pb.OpenSessionRequest) -> Message:
        async with self.turn(session.runner):
            try:
                with calling(Reason.SERVICE_UNAVAILABLE):
                    response = await self._sessions.OpenSession(request, timeout=CALL_TIMEOUT_SECONDS)
            except WeftError as error:
                session.refusal = error
                if error.reason is Reason.UNAUTHENTICATED:
                    session.revoke(error)
                raise
            finally:
                session.opening = None
            session.session_id, session.incarnation = response.session_id, request.runner.incarnation
            session.host = response.host or request.runner.host
            session.max_requests = request.runner.capability.max_requests
            session.opened.set()
            self._note_open(session)
        return response

    async def _heartbeat(self, _: LinkCall, session: LinkSession, request: pb.HeartbeatRequest) -> Message:
        require_own(session, request.session_id)
        session.last_beat = request
        request.capability.draining |= session.is_draining
        response = await self._sessions.Heartbeat(request, timeout=CALL_TIMEOUT_SECONDS)
        session.max_requests = request.capability.max_requests
        return response

    async def _close(self, _: LinkCall, session: LinkSession, request: pb.CloseSessionRequest) -> Message:
        require_own(session, request.session_id)
        response = await self._sessions.CloseSession(request, timeout=CALL_TIMEOUT_SECONDS)
        session.session_id = ""
        return response

    async def _acquire(
        self, call: LinkCall, session: LinkSession, request: lease_service_pb2.AcquireLeaseRequest
    ) -> None:
        _require_own_leases(session, request.session_id, request.holder)
        _require_own_host(session, request.sighting)
        # Without a timeout: the link's call ends with it, and the registry bounds the wait.
        waiting = self._leases.AcquireLease(request)
        try:
            async for response in waiting:
                await call.send(response.SerializeToString())
        finally:
            waiting.cancel()

    async def _renew(self, _: LinkCall, session: LinkSession, request: lease_service_pb2.RenewLeasesRequest) -> Message:
        _require_own_leases(session, request.session_id, request.holder)
        _require_own_host(session, request.sighting)
        return await self._leases.RenewLeases(request, timeout=CALL_TIMEOUT_SECONDS)

    async def _release(
        self,
        release: Callable[..., Awaitable[Message]],
        _: LinkCall,
        session: LinkSession,
        request: lease_service_pb2.ReleaseLeaseRequest | lease_service_pb2.ReleaseEarlierLivesRequest,
    ) -> Message:
        _require_own_leases(session, request.session_id, request.holder)
        return await release(request, timeout=CALL_TIMEOUT_SECONDS)


def _close_request(session: LinkSession) -> pb.CloseSessionRequest:
    return pb.CloseSessionRequest(session_id=session.session_id, incarnation=session.incarnation)


def _require_own_leases(session: LinkSession, session_id: str, holder: lease_pb2.LeaseHolder) -> None:
    require_own(session, session_id)
    own = (lease_pb2.LeaseHolder.KIND_RUNNER, session.runner, session.incarnation)
    if (holder.kind, holder.name, holder.incarnation) != own:
        raise WeftError(Reason.PERMISSION_DENIED, f"this link may only hold leases of {session.runner}")


def _require_own_host(session: LinkSession, sighting: lease_pb2.HostSighting) -> None:
    """Raise PERMISSION_DENIED for observations of another host, as they decide when leases there end."""
    if not session.host or sighting.host != session.host:
        raise WeftError(
            Reason.PERMISSION_DENIED,
            f"this link may only report observations of {session.host or 'no host'}, the host of its session",
        )
