"""Calls of a dispatcher to runners on its own machine, carried over one stream per runner.

In Python a gRPC call costs both ends together 500 us, one on a stream that is open anyway 130 us, and an idle one holds
31 KB more (measured, see docs/decisions/0088-carried-calls.md).
"""

import asyncio
from typing import Any

import grpc

from weft.api.runner.v1 import call_carrier_service_pb2 as pb
from weft.kernel.address import metadata_of
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason
from weft.kernel.rpc import ChannelPool, RpcMethod, error_from_call
from weft.kernel.service import start_task
from weft.link.frames import WINDOW_BYTES, Metadata, Side, error_of
from weft.link.link import ACCEPTED_KEY, Link, LinkCall
from weft.link.multiplexer import LinkLimits

CARRY = RpcMethod(pb.DESCRIPTOR.services_by_name["CallCarrierService"].methods_by_name["Carry"])
CARRIER_LIMITS = LinkLimits(max_own_calls=65_536, max_peer_calls=65_536)
"""Slots of runners and queues of routers bound the calls; this only bounds a fault."""
RETRY_SECONDS = 30.0
"""How long a runner that carries no calls, an older release, is not asked for it again."""
MAX_CARRIED_BYTES = WINDOW_BYTES
"""A larger request is an rpc of its own: it would delay the calls beside it."""
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

    def cancel(self) -> None:
        """Cancel the call unless it has ended; a reader gets CANCELLED."""
        self._stop_timer()
        if self._call.status is None:
            self._call.fail(WeftError(Reason.CANCELLED, "the caller gave up"))
        else:
            self._call.close()

    def _expire(self) -> None:
        self._call.fail(WeftError(Reason.DEADLINE_EXCEEDED, "the deadline of the call passed"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Carriers:
    """The streams to runners on this machine, each opened by the first call to its runner.

    That call and others until the stream is accepted are rpcs of their own, as are those to a runner that carries none.
    """

    def __init__(self, channels: ChannelPool) -> None:
        """A stream ends with its channel, so that `channels` bounds and closes them."""
        self._channels = channels
        self._links: dict[str, Link] = {}
        self._opening: set[str] = set()
        self._refused: dict[str, float] = {}
        """When a runner that carries no calls was asked, on the clock of the event loop."""

    def call(
        self, address: str, rpc: RpcMethod, request: Any, metadata: Metadata, timeout_seconds: float | None
    ) -> CarriedCall | None:
        """Begin a call; None: none is carried to this address now. Raises as `Link.call`."""
        link = self._links.get(address)
        if link is None or link.is_lost:
            self._open(address)
            return None
        message = request.SerializeToString()
        if len(message) > MAX_CARRIED_BYTES:
            return None
        call = link.call(rpc.path, metadata, timeout_seconds)
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
        try:
            channel = await self._channels.get(address)
            carry: Any = channel.stream_stream(
                CARRY.path,
                request_serializer=CARRY.request.SerializeToString,
                response_deserializer=CARRY.response.FromString,
            )
            stream = carry()
            await _until_accepted(stream)
            link = self._links[address] = Link(Side.ROUTER, CARRIER_LIMITS, _refuse)
            await link.run(stream, CARRY.request)
        except grpc.aio.AioRpcError as error:
            self._note_end(address, error_from_call(error, Reason.WORKER_LOST))
        except WeftError as error:
            self._note_end(address, error)
        finally:
            self._links.pop(address, None)
            self._opening.discard(address)
            if stream is not None:
                stream.cancel()

    def _note_end(self, address: str, error: WeftError) -> None:
        log.debug("calls are not carried", address=address, reason=error.reason.name.lower())
        if error.reason is Reason.UNSUPPORTED_OPERATION:
            self._refused[address] = asyncio.get_running_loop().time()


async def _until_accepted(stream: Any) -> None:
    """Wait until calls may begin. Raises UNSUPPORTED_OPERATION for a runner that carries none, else WORKER_LOST."""
    # A call that is refused has initial metadata too, empty.
    if not dict(await stream.initial_metadata()).get(ACCEPTED_KEY):
        is_unknown = await stream.code() is grpc.StatusCode.UNIMPLEMENTED
        reason = Reason.UNSUPPORTED_OPERATION if is_unknown else Reason.WORKER_LOST
        raise WeftError(reason, "the runner carries no calls")


async def _refuse(call: LinkCall) -> Any:
    raise WeftError(Reason.UNSUPPORTED_OPERATION, f"{call.start.method} is not served here")
