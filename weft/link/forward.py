"""Forwards calls between gRPC and a link, or two links, as raw bytes.

Each call has one request message, as those of the forwarded services.
"""

from collections.abc import Awaitable, Callable
from functools import partial

import grpc
from typing_extensions import override

from weft.api.common.v1 import link_pb2 as pb
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.link.frames import Metadata, forwardable, grpc_code, is_method, metadata_of, new_status, timeout_of
from weft.link.link import Link, LinkCall

Context = grpc.aio.ServicerContext[bytes, bytes]


async def forward_to_link(link: Link, method: str, metadata: Metadata, request: bytes, context: Context) -> pb.CallEnd:
    """Forwards a gRPC call to a link. Returns its status, for `finish`."""
    return await _forward(link.call(method, metadata, context.time_remaining()), request, context.write)


async def forward_call(call: LinkCall, link: Link, metadata: Metadata) -> pb.CallEnd:
    """Forwards a call to another link. Returns its status."""
    request = await call.read() or b""
    return await _forward(link.call(call.start.method, metadata, timeout_of(call.start)), request, call.send)


async def _forward(onward: LinkCall, request: bytes, write: Callable[[bytes], Awaitable[None]]) -> pb.CallEnd:
    try:
        await onward.send(request)
        while (message := await onward.read()) is not None:
            await write(message)
        if onward.status is None:
            raise WeftError(Reason.INTERNAL, "a call on a link ended without a status")
        return onward.status
    finally:
        onward.close()


async def finish(context: Context, status: pb.CallEnd) -> None:
    """Ends a gRPC call with the status of a call on a link."""
    trailing = metadata_of(status.trailing_metadata)
    code = grpc_code(status)
    if code is grpc.StatusCode.OK:
        context.set_trailing_metadata(trailing)
        return
    await context.abort(code, status.message, trailing_metadata=trailing)


async def forward_to_channel(call: LinkCall, channel: grpc.aio.Channel) -> pb.CallEnd:
    """Forwards a call from a link to a gRPC channel, reading the channel only while the link accepts more."""
    rpc: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(call.start.method, None, None)
    metadata = metadata_of(call.start.metadata)
    outward = rpc(await call.read() or b"", timeout=timeout_of(call.start), metadata=metadata)
    try:
        while isinstance(message := await outward.read(), bytes):
            await call.send(message)
    except grpc.aio.AioRpcError:
        pass
    finally:
        outward.cancel()
    code, message = (await outward.code()).value[0], await outward.details() or ""
    return new_status(code, message, forwardable(await outward.trailing_metadata()))


class RawServices(grpc.GenericRpcHandler):
    """Serves every method of some services with one function on raw messages."""

    def __init__(
        self,
        service_names: tuple[str, ...],
        serve: Callable[[str, bytes, Context], Awaitable[None]],
        *,
        keyed_names: tuple[str, ...] = (),
        key: str = "",
    ) -> None:
        """`serve` gets the method, the request and the context.

        `keyed_names` are services that the server also implements; calls to them are served here if their metadata has
        `key`.
        """
        self._prefixes = tuple(f"/{name}/" for name in service_names)
        self._keyed_prefixes = tuple(f"/{name}/" for name in keyed_names)
        self._key = key
        self._serve = serve

    @override
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        method = str(handler_call_details.method)
        is_keyed = method.startswith(self._keyed_prefixes) and any(
            key == self._key for key, _ in handler_call_details.invocation_metadata or ()
        )
        if not ((is_keyed or method.startswith(self._prefixes)) and is_method(method)):
            return None
        return grpc.unary_stream_rpc_method_handler(partial(self._serve, method))
