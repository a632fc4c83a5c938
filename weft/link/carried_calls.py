"""Calls of requests that share one stream between two processes, see `CallCarrierService`.

A separate gRPC call takes 500 us of CPU time at both ends together, a call on a stream 165 (docs/decisions/0008).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from weft.api.common.v1 import call_carrier_service_pb2 as pb
from weft.api.common.v1 import link_pb2
from weft.kernel.access.rpc_auth import CallCheck, call_check
from weft.kernel.channels.rpc import (
    CONNECTION_LOST,
    MAX_CHANNELS,
    CallContext,
    ChannelPool,
    RpcMethod,
    answering,
    error_from_call,
)
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import start_task
from weft.kernel.time.deadlines import Deadlines
from weft.kernel.values.address import target_of
from weft.link.frames import Metadata, Side, error_of, metadata_of, new_status, timeout_of
from weft.link.link import Link, LinkCall
from weft.link.multiplexer import LinkLimits

CARRY = RpcMethod(pb.DESCRIPTOR.services_by_name["CallCarrierService"].methods_by_name["Carry"])
LIMITS = LinkLimits(max_own_calls=65_536, max_peer_calls=65_536)
"""Slots of runners and queues of routers bound the calls; this bounds a fault."""
RECHECK_SECONDS = 1.0
"""How long a caller's access to a method holds on a stream before it is checked again: a key may be revoked."""
MAX_REMEMBERED_METHODS = 64
"""Methods whose access is remembered for a stream, several times the number that is carried."""
FLUSH_SECONDS = 1.0
"""How long a stopping server sends what is left of its calls."""
OK = new_status(0, "", ())
Serve = Callable[[Any, Any], Awaitable[Any]]
Forward = Callable[[LinkCall, Metadata], Awaitable[link_pb2.CallEnd | None]]
"""Answers a call for another process; None: it is for this one."""


class CarriedCall:
    """A call on a stream. At most one task may read it and one write it."""

    __slots__ = ("_call", "_deadlines", "_peer_lost", "_response")

    def __init__(self, call: LinkCall, response: Any, peer_lost: Reason, deadlines: Deadlines[LinkCall]) -> None:
        """`response`: the class of its messages; `peer_lost` is the reason for one that cannot be read."""
        self._call = call
        self._response = response
        self._peer_lost = peer_lost
        self._deadlines = deadlines

    async def read(self) -> Any:
        """Returns the next message; `grpc.aio.EOF` after the last. Raises the WeftError that ended the call."""
        message = await self._call.read()
        if message is not None:
            try:
                return self._response.FromString(message)
            except DecodeError:
                raise WeftError(self._peer_lost, "a message of the peer cannot be read") from None
        self._deadlines.remove(self._call)
        status = self._call.status
        if status is None or status.code != 0:
            raise WeftError(Reason.INTERNAL, "a call ended without a status") if status is None else error_of(status)
        return grpc.aio.EOF

    async def write(self, message: Message) -> None:
        """Sends a message, waiting while the peer has no room. Does nothing if the call has ended."""
        await self._call.send(message.SerializeToString())

    @property
    def is_answered(self) -> bool:
        """Whether its peer ended it: not its deadline, its cancellation or the loss of the stream."""
        return self._call.is_answered

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._call.status is not None

    def cancel(self) -> None:
        """Cancels the call unless it has ended; a reader gets CANCELLED."""
        self._deadlines.remove(self._call)
        self._call.close()


class CallStream:
    """The stream to one server: opened by the first call, and again after it was lost."""

    def __init__(self, channel: grpc.aio.Channel, peer_lost: Reason, unreached: Reason) -> None:
        """`peer_lost` is the reason of calls that end with their stream, `unreached` without a connection."""
        self.channel = channel
        self._peer_lost = peer_lost
        self._unreached = unreached
        self._link: Link | None = None
        self._deadlines = Deadlines[LinkCall](_deadline_passed)

    def call(self, rpc: RpcMethod, metadata: Metadata, timeout_seconds: float | None) -> CarriedCall:
        """Begins a call. Raises NO_SLOT_AVAILABLE if the stream has too many; all other errors end the call."""
        link = self._link
        if link is None or link.lost_status is not None:
            link = self._link = Link(Side.ROUTER, LIMITS, _refuse, loss=self._loss)
            start_task(self._run(link), name="call-stream")
        call = link.call(rpc.path, metadata, timeout_seconds)
        if timeout_seconds is not None:
            self._deadlines.add(call, timeout_seconds)
        return CarriedCall(call, rpc.response, self._peer_lost, self._deadlines)

    async def _run(self, link: Link) -> None:
        opened: Any = self.channel.stream_stream(
            CARRY.path,
            request_serializer=CARRY.request.SerializeToString,
            response_deserializer=CARRY.response.FromString,
        )
        stream = None
        # Its calls tell.
        with suppress(WeftError, grpc.aio.UsageError):
            try:
                stream = opened()
                await link.run(stream, CARRY.request)
            finally:
                link.lose()
                if stream is not None:
                    stream.cancel()

    def _loss(self, error: BaseException | None) -> WeftError:
        cause = error.__cause__ if isinstance(error, WeftError) else None
        if isinstance(cause, grpc.aio.AioRpcError):
            return error_from_call(cause, self._peer_lost, self._unreached)
        return WeftError(self._peer_lost, CONNECTION_LOST)


class CallStreams:
    """The streams to runners by their addresses; those behind one relay share one."""

    def __init__(self, channels: ChannelPool) -> None:
        """A stream ends with its channel, so that `channels` bounds and closes them."""
        self._channels = channels
        self._streams: dict[str, CallStream] = {}

    async def to(self, address: str) -> CallStream:
        """Returns the stream to a runner."""
        target = target_of(address)
        channel = await self._channels.get(target)
        stream = self._streams.get(target)
        if stream is None or stream.channel is not channel:
            if len(self._streams) >= MAX_CHANNELS:
                # The oldest; its calls go on.
                del self._streams[next(iter(self._streams))]
            stream = self._streams[target] = CallStream(channel, Reason.WORKER_LOST, Reason.RUNNER_UNREACHABLE)
        return stream


class CarriedContext(CallContext):
    """The context of a carried call, for a servicer."""

    __slots__ = ("_answers_at", "_call", "_request")

    def __init__(self, call: LinkCall, metadata: Metadata, request: Any) -> None:
        """`request`: the class of its messages."""
        super().__init__(metadata)
        self._call = call
        self._request = request
        timeout = timeout_of(call.start)
        self._answers_at = None if timeout is None else time.monotonic() + timeout

    def time_remaining(self) -> float | None:
        """Returns the seconds to the deadline of the call; None: it has none."""
        return None if self._answers_at is None else max(0.0, self._answers_at - time.monotonic())

    async def read(self) -> Any:
        """Returns the next message; `grpc.aio.EOF` after the last. Raises MALFORMED_REQUEST."""
        message = await self._call.read()
        if message is None:
            return grpc.aio.EOF
        try:
            return self._request.FromString(message)
        except DecodeError:
            raise WeftError(Reason.MALFORMED_REQUEST, "the message cannot be read") from None

    async def write(self, message: Message) -> None:
        """Sends a message, waiting while the caller has no room."""
        await self._call.send(message.SerializeToString())


class CarriedCalls:
    """The server's end of the streams."""

    def __init__(self, methods: Mapping[RpcMethod, Serve], forward: Forward | None = None) -> None:
        """`methods` are served by functions of request and context, `forward` is asked first."""
        self._methods = {rpc.path: (rpc, serve) for rpc, serve in methods.items()}
        self._forward = forward
        self._links: set[Link] = set()

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Adds CallCarrierService to a server."""
        handler: Any = grpc.stream_stream_rpc_method_handler(
            self._carry,
            request_deserializer=CARRY.request.FromString,
            response_serializer=CARRY.response.SerializeToString,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(CARRY.service, {CARRY.name: handler}),))

    async def stop(self) -> None:
        """Sends what is left of the calls that have ended, then ends every stream, and the remaining calls with it."""
        links = list(self._links)
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                for link in links:
                    await link.until_sent()
        for link in links:
            link.stop(WeftError(Reason.SHUTTING_DOWN, "the process is shutting down"))

    async def _carry(self, _requests: object, context: Any) -> None:
        async with answering(context):
            allowed = _Allowed(call_check())

            def answer(call: LinkCall) -> Awaitable[link_pb2.CallEnd]:
                allowed.require(call.start.method)
                return self.answer(call)

            link = Link(Side.RUNNER, LIMITS, answer)
            self._links.add(link)
            try:
                await link.run(context, CARRY.response)
            finally:
                self._links.discard(link)

    def serves(self, method: str) -> bool:
        """Whether a method such as `/package.Service/Method` is served here."""
        return method in self._methods

    async def answer(self, call: LinkCall) -> link_pb2.CallEnd:
        """Serves a call. Returns its status, or raises the error that is one."""
        metadata = metadata_of(call.start.metadata)
        if self._forward is not None and (status := await self._forward(call, metadata)) is not None:
            return status
        known = self._methods.get(call.start.method)
        if known is None:
            raise WeftError(Reason.UNSUPPORTED_OPERATION, f"{call.start.method} is not carried here")
        rpc, serve = known
        context = CarriedContext(call, metadata, rpc.request)
        request = None if rpc.takes_stream else await context.read()
        if request is grpc.aio.EOF:
            raise WeftError(Reason.MALFORMED_REQUEST, "the call has no request")
        answer = await serve(request, context)
        if answer is not None:
            await context.write(answer)
        return OK


class _Allowed:
    """The methods that the caller of a stream may call, each checked again after RECHECK_SECONDS."""

    def __init__(self, check: CallCheck) -> None:
        self._check = check
        self._until: dict[str, float] = {}

    def require(self, method: str) -> None:
        """Raises UNAUTHENTICATED or PERMISSION_DENIED."""
        now = time.monotonic()
        if self._until.get(method, 0.0) < now:
            self._check(method)
            if len(self._until) >= MAX_REMEMBERED_METHODS:
                self._until.clear()
            self._until[method] = now + RECHECK_SECONDS


def _deadline_passed(call: LinkCall) -> None:
    call.fail(WeftError(Reason.DEADLINE_EXCEEDED, "the deadline of the call passed"))


async def _refuse(call: LinkCall) -> link_pb2.CallEnd:
    raise WeftError(Reason.UNSUPPORTED_OPERATION, f"{call.start.method} is not served here")
