"""The runner's end of the streams that carry calls from its own machine, see `weft.link.carriers`."""

import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from weft.api.common.v1 import link_pb2
from weft.api.runner.v1 import call_carrier_service_pb2 as pb
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import RpcMethod, answering
from weft.link.carriers import CARRIER_LIMITS, CARRY, METHODS_KEY
from weft.link.frames import Metadata, Side, metadata_of, timeout_of
from weft.link.link import ACCEPTED_KEY, Link, LinkCall
from weft.link.own_calls import OK, CallContext, EndedError, OwnCall, Serve
from weft.link.pipe import PipeOffer

CARRIER_SERVICE = CARRY.service


class CarriedContext(CallContext):
    """The context of one carried call."""

    __slots__ = ("_began", "_call")

    def __init__(self, call: LinkCall) -> None:
        self._call = call
        self._began = time.monotonic()

    async def write(self, message: Message) -> None:
        """Send a message once the transport has the one before it: what comes meanwhile is sent together."""
        await self._call.until_sent()
        self._call.put(message.SerializeToString())

    def invocation_metadata(self) -> Metadata:
        """Metadata of the call."""
        return metadata_of(self._call.start.metadata)

    def time_remaining(self) -> float | None:
        """Seconds to the deadline of the call; None: it has none."""
        timeout = timeout_of(self._call.start)
        return None if timeout is None else max(0.0, timeout - (time.monotonic() - self._began))


class CarriedCalls:
    """The carried calls of one runner, over any number of streams, and those of dispatchers in its own process."""

    def __init__(self, *, offers_pipes: bool = True) -> None:
        """`offers_pipes`: False leaves all frames on the streams of gRPC, as releases without pipes do."""
        self._offers_pipes = offers_pipes
        self._methods: dict[str, tuple[RpcMethod, Serve]] = {}
        self._links: set[Link] = set()
        self._own: set[OwnCall] = set()

    def serve(self, rpc: RpcMethod, serve: Serve) -> None:
        """Serve a streamed method."""
        self._methods[rpc.path] = rpc, serve

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Add CallCarrierService to a server."""
        handler: Any = grpc.stream_stream_rpc_method_handler(
            self._carry,
            request_deserializer=pb.CarryRequest.FromString,
            response_serializer=pb.CarryResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(CARRY.service, {CARRY.name: handler}),))

    def stop(self) -> None:
        """End every stream, and the calls that are left with it."""
        error = WeftError(Reason.SHUTTING_DOWN, "the runner is shutting down")
        for link in self._links:
            link.stop(error)
        for call in self._own:
            call.fail(error)

    def call(self, rpc: RpcMethod, request: Any, metadata: Metadata, timeout_seconds: float | None) -> OwnCall | None:
        """Begin a call from this process; None: the method is not carried."""
        known = self._methods.get(rpc.path)
        if known is None:
            return None
        call = OwnCall(metadata, timeout_seconds)
        self._own.add(call)
        call.serve(known[1], request).add_done_callback(lambda _: self._own.discard(call))
        return call

    # Read and written through the context, which the stub of gRPC does not know.
    async def _carry(self, requests: AsyncIterator[pb.CarryRequest], context: Any) -> None:  # noqa: ARG002
        async with answering(context):
            link = Link(Side.RUNNER, CARRIER_LIMITS, self._answer)
            offer = PipeOffer(link)
            try:
                offered = offer.start() if self._offers_pipes else ()
                methods = (METHODS_KEY, ",".join(self._methods))
                await context.send_initial_metadata(((ACCEPTED_KEY, "1"), methods, *offered))
                self._links.add(link)
                await link.run(context, pb.CarryResponse)
            finally:
                self._links.discard(link)
                offer.stop()

    async def _answer(self, call: LinkCall) -> link_pb2.CallEnd:
        known = self._methods.get(call.start.method)
        if known is None:
            raise WeftError(Reason.UNSUPPORTED_OPERATION, f"{call.start.method} is not carried")
        rpc, serve = known
        message = await call.read()
        try:
            request = rpc.request.FromString(message or b"")
        except DecodeError:
            raise WeftError(Reason.MALFORMED_REQUEST, "the request of a carried call cannot be read") from None
        try:
            await serve(request, CarriedContext(call))
        except EndedError as end:
            return end.status
        return OK
