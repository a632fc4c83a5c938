"""Frames over an Attach stream, from either end."""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import grpc

from weft.api.router.v1 import relay_service_pb2 as pb
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import MAX_METADATA_BYTES, PING_TIMEOUT_MS, error_from_call
from weft.link.codec import from_messages, to_messages
from weft.link.frames import Frame

LINK_KEEPALIVE_MS = 10_000
"""A pulled cable is noticed within this and the ping timeout."""
ACCEPTED_KEY = "weft-relay"
"""Initial metadata by which a relay says that it has taken a link."""
CLOCK_KEY = "weft-time"
"""Initial metadata beside it: the relay's clock in milliseconds since the epoch, for runners whose own is off."""
MAX_LINK_MESSAGE_BYTES = 1024 * 1024
"""Many times a batch of frames; what is larger was not sent by a peer that keeps the rules."""

_LINK_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_LINK_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_LINK_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", LINK_KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
LINK_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_LINK_OPTIONS,
    # Each attempt is a channel of its own, and the back-off is ours: one kept inside gRPC would add to it.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
)
LINK_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_LINK_OPTIONS,
    # Both ends must agree, or the server ends the connection with too_many_pings.
    ("grpc.http2.min_ping_interval_without_data_ms", LINK_KEEPALIVE_MS // 3),
    ("grpc.http2.max_ping_strikes", 4),
    ("grpc.so_reuseport", 0),
)


class _Stream(Protocol):
    async def read(self) -> Any: ...

    async def write(self, message: Any) -> None: ...


class AttachTransport:
    """See weft.link.link.Transport. `stream` is the call of a runner or the context of a router."""

    def __init__(self, stream: _Stream, kind: type[pb.AttachRequest] | type[pb.AttachResponse]) -> None:
        """`kind` is what this end sends."""
        self._stream = stream
        self._kind = kind

    async def read(self) -> Sequence[Frame] | None:
        """See Transport.read."""
        try:
            message = await self._stream.read()
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error
        return None if message is grpc.aio.EOF else from_messages(message.frames)

    async def write(self, frames: Sequence[Frame]) -> None:
        """See Transport.write."""
        try:
            await self._stream.write(self._kind(frames=to_messages(frames)))
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error
        except asyncio.InvalidStateError as error:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the stream of the link has ended") from error
