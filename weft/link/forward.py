"""Forwards calls between gRPC and a link, or two links, as raw bytes.

Every gRPC method is treated as bidirectional streaming, since all kinds are the same on the wire.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from typing_extensions import override

from weft.api.common.v1 import link_pb2 as pb
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.link.frames import Metadata, forwardable, grpc_code, is_method, metadata_of, new_status, timeout_of
from weft.link.link import Link, LinkCall

Context = grpc.aio.ServicerContext[bytes, bytes]


async def forward_to_link(
    link: Link, method: str, metadata: Metadata, requests: AsyncIterator[bytes], context: Context
) -> pb.CallEnd:
    """Forwards a gRPC call to a link. Returns its status, for `finish`."""
    call = link.call(method, metadata, context.time_remaining())
    sending = asyncio.create_task(_send_requests(call, requests))
    try:
        while (message := await call.read()) is not None:
            await context.write(message)
        return _status(call)
    finally:
        sending.cancel()
        call.close()
        await asyncio.gather(sending, return_exceptions=True)


async def forward_call(call: LinkCall, link: Link, metadata: Metadata) -> pb.CallEnd:
    """Forwards a call with one request to another link. Returns its status."""
    onward = link.call(call.start.method, metadata, timeout_of(call.start))
    try:
        await onward.send(await call.read() or b"")
        while (message := await onward.read()) is not None:
            await call.send(message)
        return _status(onward)
    finally:
        onward.close()


def _status(call: LinkCall) -> pb.CallEnd:
    if call.status is None:
        raise WeftError(Reason.INTERNAL, "a call on a link ended without a status")
    return call.status


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
    method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(call.start.method, None, None)
    outward = method(timeout=timeout_of(call.start), metadata=metadata_of(call.start.metadata))
    sending = asyncio.create_task(_write_requests(call, outward))
    try:
        while isinstance(message := await outward.read(), bytes):
            await call.send(message)
    except grpc.aio.AioRpcError:
        pass
    finally:
        outward.cancel()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    code, message = (await outward.code()).value[0], await outward.details() or ""
    return new_status(code, message, forwardable(await outward.trailing_metadata()))


class RawServices(grpc.GenericRpcHandler):
    """Serves every method of some services with one function on raw messages."""

    def __init__(
        self,
        service_names: tuple[str, ...],
        serve: Callable[[str, AsyncIterator[bytes], Context], Any],
        *,
        keyed_names: tuple[str, ...] = (),
        key: str = "",
    ) -> None:
        """`serve` gets the method, the requests and the context.

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

        async def serve(requests: AsyncIterator[bytes], context: Context) -> None:
            await self._serve(method, requests, context)

        return grpc.stream_stream_rpc_method_handler(serve)


async def _send_requests(call: LinkCall, requests: AsyncIterator[bytes]) -> None:
    try:
        async for message in requests:
            await call.send(message)
    except WeftError as error:
        call.fail(error)
    call.half_close()


async def _write_requests(call: LinkCall, outward: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
    while (message := await call.read()) is not None:
        await outward.write(message)
    await outward.done_writing()
