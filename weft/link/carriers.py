"""Calls of a dispatcher to runners on its own machine, carried over one stream per runner.

In Python a gRPC call costs both ends together 500 us, one on a stream that is open anyway 130 us, and an idle one holds
31 KB more (measured, see docs/decisions/0008-links-carry-calls.md).
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import grpc

from weft.api.runner.v1 import call_carrier_service_pb2 as pb
from weft.kernel.address import metadata_of
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason
from weft.kernel.rpc import ChannelPool, RpcMethod, calling
from weft.kernel.service import start_task
from weft.link.frames import WINDOW_BYTES, Metadata, Side, error_of
from weft.link.link import ACCEPTED_KEY, Link, LinkCall
from weft.link.multiplexer import LinkLimits
from weft.link.own_calls import OwnCall
from weft.link.pipe import FramePipe, connect_pipe

CARRY = RpcMethod(pb.DESCRIPTOR.services_by_name["CallCarrierService"].methods_by_name["Carry"])
CARRIER_LIMITS = LinkLimits(max_own_calls=65_536, max_peer_calls=65_536)
"""Slots of runners and queues of routers bound the calls; this only bounds a fault."""
RETRY_SECONDS = 30.0
"""How long a runner that carries no calls, an older release, is not asked for it again."""
MAX_CARRIED_BYTES = WINDOW_BYTES
"""A larger request is an rpc of its own: it would delay the calls beside it."""
METHODS_KEY = "weft-carries"
"""Initial metadata of a stream: the paths of the methods that it carries, with commas between them."""
_LOCAL = "unix:"

log = get_logger("weft.link")


class CarriedCall:
    """One carried call with one request, as `grpc.aio.UnaryStreamCall`; its errors are WeftErrors."""

    __slots__ = ("_call", "_response", "_timer")

    def __init__(self, call: LinkCall, response: Any, timeout_seconds: float | None) -> None:
        """`response` is the class of its messages."""
        self._call = call
        self._response = response
        self._timer: asyncio.TimerHandle | None = None
        if timeout_seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(timeout_seconds, self._expire)

    async def read(self) -> Any:
        """Returns the next message; `grpc.aio.EOF` after the last. Raises the WeftError that ended the call."""
        message = await self._call.read()
        if message is not None:
            return self._response.FromString(message)
        self._stop_timer()
        status = self._call.status
        if status is None or status.code != 0:
            raise WeftError(Reason.INTERNAL, "a call ended without a status") if status is None else error_of(status)
        return grpc.aio.EOF

    def done(self) -> bool:
        """Whether the call has ended, read or not."""
        return self._call.status is not None

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback` with the call once it has ended otherwise than by `cancel`; only without a reader."""
        self._call.on_end(lambda: callback(self))

    def cancel(self) -> None:
        """Cancel the call unless it has ended; a reader gets CANCELLED."""
        self._stop_timer()
        self._call.close()
        self._call.wake()

    def _expire(self) -> None:
        self._call.fail(WeftError(Reason.DEADLINE_EXCEEDED, "the deadline of the call passed"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class OwnCalls(Protocol):
    """Calls to a runner of this process, as `weft.link.carried_calls.CarriedCalls` has them."""

    def call(self, rpc: RpcMethod, request: Any, metadata: Metadata, timeout_seconds: float | None) -> OwnCall | None:
        """Begin a call; None: the method is not carried."""


class _Stream(NamedTuple):
    """A stream that is accepted."""

    link: Link
    methods: frozenset[str]
    """Paths of the methods that it carries."""


class Carriers:
    """The streams to runners on this machine, each opened by the first call to its runner.

    That call and others until the stream is accepted are rpcs of their own, as are those to a runner that carries none.
    """

    def __init__(self, channels: ChannelPool) -> None:
        """A stream ends with its channel, so that `channels` bounds and closes them."""
        self._channels = channels
        self._own: dict[str, OwnCalls] = {}
        self._streams: dict[str, _Stream] = {}
        self._opening: set[str] = set()
        self._refused: dict[str, float] = {}
        """When a runner that carries no calls was asked, on the clock of the event loop."""

    def add_own(self, address: str, calls: OwnCalls) -> None:
        """Make calls to the runner of this process, at its address, without a stream."""
        self._own[address] = calls

    def call(
        self, address: str, rpc: RpcMethod, request: Any, metadata: Metadata, timeout_seconds: float | None
    ) -> CarriedCall | OwnCall | None:
        """Begin a call; None: none is carried to this address now. Raises as `Link.call`."""
        own = self._own.get(address)
        if own is not None:
            return own.call(rpc, request, metadata, timeout_seconds)
        stream = self._streams.get(address)
        if stream is None or stream.link.is_lost:
            self._open(address)
            return None
        if rpc.path not in stream.methods:
            return None
        message = request.SerializeToString()
        if len(message) > MAX_CARRIED_BYTES:
            return None
        self._channels.note_use(address)
        call = stream.link.call(rpc.path, metadata, timeout_seconds)
        call.put(message)
        return CarriedCall(call, rpc.response, timeout_seconds)

    def _open(self, address: str) -> None:
        if not address.startswith(_LOCAL) or address in self._opening or metadata_of(address):
            return
        now = asyncio.get_running_loop().time()
        if now - self._refused.get(address, -RETRY_SECONDS) < RETRY_SECONDS:
            return
        self._opening.add(address)
        start_task(self._keep(address), name="call-carrier")

    async def _keep(self, address: str) -> None:
        """Carry calls to an address until the stream ends; the next call opens another one."""
        stream: Any = None
        pipe: FramePipe | None = None
        try:
            channel = await self._channels.get(address)
            carry: Any = channel.stream_stream(
                CARRY.path,
                request_serializer=CARRY.request.SerializeToString,
                response_deserializer=CARRY.response.FromString,
            )
            stream = carry()
            with calling(Reason.WORKER_LOST):
                offered = await _until_accepted(stream)
                link = Link(Side.ROUTER, CARRIER_LIMITS, _refuse)
                pipe = await connect_pipe(link, offered)
                self._streams[address] = _Stream(link, frozenset(offered.get(METHODS_KEY, "").split(",")))
                await link.run(stream, CARRY.request)
        except WeftError as error:
            self._note_end(address, error)
        finally:
            self._streams.pop(address, None)
            self._opening.discard(address)
            if pipe is not None:
                pipe.close()
            if stream is not None:
                stream.cancel()

    def _note_end(self, address: str, error: WeftError) -> None:
        log.debug("calls are not carried", address=address, reason=error.reason.name.lower())
        if error.reason is Reason.UNSUPPORTED_OPERATION:
            self._refused[address] = asyncio.get_running_loop().time()


async def _until_accepted(stream: Any) -> Mapping[str, Any]:
    """Returns the initial metadata of a stream once calls may begin.

    Raises UNSUPPORTED_OPERATION for a runner that carries none, else WORKER_LOST.
    """
    # A call that is refused has initial metadata too, empty.
    found: dict[str, Any] = dict(await stream.initial_metadata())
    if not found.get(ACCEPTED_KEY):
        is_unknown = await stream.code() is grpc.StatusCode.UNIMPLEMENTED
        reason = Reason.UNSUPPORTED_OPERATION if is_unknown else Reason.WORKER_LOST
        raise WeftError(reason, "the runner carries no calls")
    return found


async def _refuse(call: LinkCall) -> Any:
    raise WeftError(Reason.UNSUPPORTED_OPERATION, f"{call.start.method} is not served here")
