"""gRPC plumbing: channel and server options, and conversion between WeftError and status."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from inspect import iscoroutinefunction
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

import grpc
from google.protobuf import any_pb2, descriptor, duration_pb2, message_factory
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from weft.kernel.channels.failover_channel import BlockingFailoverChannel, FailoverChannel
from weft.kernel.channels.tls import TlsFiles
from weft.kernel.channels.tls_channel import ChannelOpener, ChannelSecurity
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.open_files import max_connections
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.cancellation import task_is_cancelled
from weft.kernel.values.address import addresses_of, needs_tls, target_of

ERROR_DOMAIN = "weft"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_METADATA_BYTES = 16 * 1024
KEEPALIVE_INTERVAL_MS = 30_000
# Only this option detects a frozen peer; its default is 60 s (measured, grpcio 1.85).
PING_TIMEOUT_MS = 10_000
FIRST_RECONNECT_MS = 100
MAX_RECONNECT_MS = 2_000
CONNECT_ATTEMPT_MS = 10_000
"""Timeout of a connection attempt, including the handshake: gRPC's minimum backoff, 20 s by default. TCP retransmits
the packets of an attempt that began while the link was down at growing intervals; a new attempt starts immediately."""
MAX_STREAMS_PER_CONNECTION = 8_192
"""Maximum open calls of one connection to a server; the next one waits in its client. A call whose message never comes
holds 12 KiB (measured, grpcio 1.85), and gRPC has no limit by default."""
MAX_CHANNELS = 1024

log = get_logger("weft.rpc")

RpcT = ParamSpec("RpcT")
AnswerT = TypeVar("AnswerT")

_COMMON_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON_OPTIONS,
    # A restarting runner is back within a second or two; the default backoff grows to 120 s.
    ("grpc.initial_reconnect_backoff_ms", FIRST_RECONNECT_MS),
    ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_MS),
    ("grpc.min_reconnect_backoff_ms", CONNECT_ATTEMPT_MS),
    ("grpc.enable_http_proxy", 0),
)
POOLED_OPTIONS: tuple[tuple[str, int], ...] = (
    *CHANNEL_OPTIONS,
    # The dispatcher retries elsewhere and counts attempts, which retries by gRPC would bypass. A call without them
    # takes 6 KB less memory (measured, grpcio 1.85).
    ("grpc.enable_retries", 0),
)
FAILOVER_OPTIONS: tuple[tuple[str, int], ...] = tuple(
    # Detects a frozen owner by the time its standby has taken over. Servers allow a ping every 10 s at most.
    (dict(CHANNEL_OPTIONS) | {"grpc.keepalive_time_ms": 12_000, "grpc.http2.ping_timeout_ms": 4_000}).items()
)
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON_OPTIONS,
    # Both ends must agree, or the server ends the connection with too_many_pings.
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_INTERVAL_MS // 3),
    ("grpc.http2.max_ping_strikes", 4),
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
)


def open_channel(address: str, security: ChannelSecurity | None = None) -> grpc.aio.Channel:
    """Returns a channel to an address: plaintext to this machine, TLS elsewhere (see `weft.kernel.values.address`).

    With several comma-separated addresses, calls go to the one that serves. Without `security`, the default root
    certificates apply. Calls to a runner also need `weft.kernel.values.address.metadata_of` its address. Raises
    INVALID_ARGUMENT naming an invalid file of `security`.
    """
    addresses = addresses_of(address)
    if len(addresses) > 1:
        return FailoverChannel(
            {each: _opener(each, security).open(target_of(each), FAILOVER_OPTIONS) for each in addresses}
        )
    return _opener(address, security).open(target_of(address), CHANNEL_OPTIONS)


def open_blocking_channel(address: str, security: ChannelSecurity | None = None) -> grpc.Channel:
    """Returns a channel like `open_channel`, for programs without an event loop."""
    addresses = addresses_of(address)
    if len(addresses) > 1:
        return BlockingFailoverChannel(
            [_opener(each, security).open_sync(target_of(each), CHANNEL_OPTIONS) for each in addresses]
        )
    return _opener(address, security).open_sync(target_of(address), CHANNEL_OPTIONS)


def _opener(address: str, security: ChannelSecurity | None) -> ChannelOpener:
    chosen = security or ChannelSecurity()
    # Local calls use no TLS: do not fail because of invalid files.
    return ChannelOpener(chosen if needs_tls(target_of(address)) else replace(chosen, files=TlsFiles()))


def new_server(interceptors: Sequence[grpc.aio.ServerInterceptor] = ()) -> grpc.aio.Server:
    """Returns a gRPC server with the mesh's limits and keepalive."""
    return grpc.aio.server(interceptors=interceptors, options=(*SERVER_OPTIONS, *connection_options()))


def connection_options() -> tuple[tuple[str, int], ...]:
    """Returns the options that limit the connections of each listener; gRPC closes further ones without a message.

    gRPC cannot limit a header block without end: each connection keeps up to 32 MiB of it (measured, grpcio 1.85).
    """
    most = max_connections()
    return () if most is None else (("grpc.max_allowed_incoming_connections", most),)


class RpcMethod:
    """An rpc and its message classes."""

    def __init__(self, method: descriptor.MethodDescriptor) -> None:
        service = method.containing_service
        self.service: str = service.full_name
        self.name: str = method.name
        self.path = f"/{service.full_name}/{method.name}"
        self.is_streamed: bool = method.server_streaming
        self.takes_stream: bool = method.client_streaming
        self.request: Any = message_factory.GetMessageClass(method.input_type)
        self.response: Any = message_factory.GetMessageClass(method.output_type)


def add_methods(server: grpc.aio.Server, methods: Mapping[RpcMethod, Callable[..., Any]]) -> None:
    """Adds rpcs with a single request message to a server, each served by a function of request and context."""
    services: dict[str, dict[str, Any]] = {}
    for rpc, serve in methods.items():
        handler = grpc.unary_stream_rpc_method_handler if rpc.is_streamed else grpc.unary_unary_rpc_method_handler
        services.setdefault(rpc.service, {})[rpc.name] = handler(
            serve, request_deserializer=rpc.request.FromString, response_serializer=rpc.response.SerializeToString
        )
    for service, handlers in services.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


class ChannelPool:
    """An LRU cache of at most MAX_CHANNELS channels by address."""

    def __init__(self, security: ChannelSecurity | None = None) -> None:
        """Raises INVALID_ARGUMENT naming an invalid file of `security`."""
        self._opener = ChannelOpener(security)
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()

    async def get(self, address: str) -> grpc.aio.Channel:
        """Returns the channel to `address`, opened on first use; runners behind one relay share it."""
        target = target_of(address)
        channel = self._channels.get(target)
        if channel is None:
            channel = self._channels[target] = self._opener.open(target, POOLED_OPTIONS)
            if len(self._channels) > MAX_CHANNELS:
                _, oldest = self._channels.popitem(last=False)
                await oldest.close(grace=None)
        else:
            self._channels.move_to_end(target)
        return channel

    async def close(self) -> None:
        """Closes all channels and cancels their calls."""
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close(grace=None)


def error_to_status(error: WeftError) -> status_pb2.Status:
    """Returns the status of an error, with an ErrorInfo, and if they apply a RetryInfo, a BadRequest and a DebugInfo.

    The BadRequest names the invalid field; the DebugInfo has the engine's exit and log.
    """
    info = error_details_pb2.ErrorInfo(reason=error.reason.name, domain=ERROR_DOMAIN, metadata=error.metadata)
    details = [_packed(info)]
    if error.retry_after_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_seconds * 1e9))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    if isinstance(error, FieldError):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if error.engine_exit or error.engine_log:
        seen = error_details_pb2.DebugInfo(detail=error.engine_exit, stack_entries=error.engine_log)
        details.append(_packed(seen))
    code = code_pb2.Code.Value(error.traits.grpc_code)
    return status_pb2.Status(code=code, message=error.message, details=details)


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


# Codes that gRPC itself raises, without an ErrorInfo.
_BARE_CODES: dict[grpc.StatusCode, Reason] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: Reason.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED: Reason.CANCELLED,
    grpc.StatusCode.UNIMPLEMENTED: Reason.UNSUPPORTED_OPERATION,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Reason.REQUEST_TOO_LARGE,
    grpc.StatusCode.INVALID_ARGUMENT: Reason.INVALID_ARGUMENT,
}


def error_from_call(error: grpc.RpcError, peer_lost: Reason, unreached: Reason | None = None) -> WeftError:
    """Returns the WeftError of a failed call.

    `peer_lost` is the reason for a transport failure: WORKER_LOST for a runner, SERVICE_UNAVAILABLE for a service. A
    reset stream arrives as INTERNAL and is also a transport failure. `unreached` is the reason if there was no
    connection, so that nothing was sent; None: the same.
    """
    # Errors of calls are both RpcError and Call, but the stubs only declare the former.
    call = cast("grpc.Call", error)
    status = rpc_status.from_call(call)
    if status is not None:
        found = error_from_details(status)
        if found is not None:
            return found
    code, details = call.code(), call.details() or ""
    was_reset = code == grpc.StatusCode.INTERNAL and "RST_STREAM" in details
    # Our services give a reason when they cancel. A closing server resets its remaining calls without one.
    was_closed = code == grpc.StatusCode.CANCELLED and details == _CLOSED_BY_SERVER
    # The connection broke while the call was starting.
    was_removed = code == grpc.StatusCode.UNKNOWN and details.startswith(_REMOVED)
    # A message could not be written; the status of the broken connection had not arrived yet.
    was_unwritten = code == grpc.StatusCode.INTERNAL and details == _UNWRITTEN
    if code == grpc.StatusCode.UNAVAILABLE or was_reset or was_closed or was_removed or was_unwritten:
        words = next((words for said, words in _HANDSHAKE_WORDS if said in details), None)
        if words is None and unreached is not None and details.startswith(_UNCONNECTED):
            return WeftError(unreached, "no connection could be established")
        return WeftError(peer_lost, words or CONNECTION_LOST)
    return WeftError(_BARE_CODES.get(code, Reason.INTERNAL), details or code.name.lower())


def was_answered(error: WeftError) -> bool:
    """Whether a call's error, raised by `calling`, is the peer's own answer; False: nothing answered."""
    cause = error.__cause__
    status = rpc_status.from_call(cast("grpc.Call", cause)) if isinstance(cause, grpc.RpcError) else None
    return status is not None and error_from_details(status) is not None


_CLOSED_BY_SERVER = "CANCELLED"
"""gRPC's details of a call that the server has reset; those of a cancellation by the caller differ."""
_REMOVED = "Stream removed"
"""gRPC's details of a call after its connection was lost."""
_UNWRITTEN = "Internal error from Core"
"""gRPC's details (grpcio 1.85) of a streaming call that could not write a message."""
_UNCONNECTED = "failed to connect to all addresses"
"""Beginning of gRPC's details (grpcio 1.85) of a call without a connection; no byte of it was sent."""
_CLOSED_AT_ONCE = "the peer closed the connection immediately; it may ask for TLS, or for another certificate"
_HANDSHAKE_WORDS: tuple[tuple[str, str], ...] = (
    ("CERTIFICATE_VERIFY_FAILED: certificate has expired", "the peer's certificate has expired"),
    ("CERTIFICATE_VERIFY_FAILED: certificate is not yet valid", "the peer's certificate is not valid yet"),
    ("CERTIFICATE_VERIFY_FAILED", "the peer's certificate is not from a trusted authority"),
    ("Hostname Verification Check failed", "the peer's certificate is for another name"),
    ("WRONG_VERSION_NUMBER", "the peer does not speak TLS"),
    # A server that rejects the caller's certificate, or plaintext, closes the connection.
    ("failed to connect to all addresses; last error: UNAVAILABLE", _CLOSED_AT_ONCE),
)
"""gRPC's messages for failed connections (grpcio 1.85), and their meaning."""


CONNECTION_LOST = "the connection was lost"
"""Message for a connection that failed for an unknown reason."""


class calling:  # noqa: N801 - reads as a statement: `with calling(Reason.SERVICE_UNAVAILABLE):`
    """Wraps a grpc.aio call: raises its failure as a WeftError (see `error_from_call`).

    If the channel is closed during the call, the call is lost; the waiting task is not cancelled.
    """

    __slots__ = ("_peer_lost", "_unreached")

    def __init__(self, peer_lost: Reason, unreached: Reason | None = None) -> None:
        """`peer_lost` is the reason for a transport failure, `unreached` if there was no connection; None: the same."""
        self._peer_lost = peer_lost
        self._unreached = unreached

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, grpc.aio.AioRpcError):
            raise error_from_call(error, self._peer_lost, self._unreached) from error
        is_cut = isinstance(error, asyncio.CancelledError) and not task_is_cancelled()
        if is_cut or (isinstance(error, grpc.aio.UsageError) and str(error) == _CHANNEL_CLOSED):
            raise WeftError(self._peer_lost, CONNECTION_LOST) from error


_CHANNEL_CLOSED = "Channel is closed."
"""gRPC's message (grpcio 1.85) for a call on a closed channel."""


def error_from_details(status: status_pb2.Status) -> WeftError | None:
    """Returns the WeftError in the details of a status; None if there is none."""
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    has_info = any(detail.Unpack(info) for detail in status.details)
    if not has_info or info.domain != ERROR_DOMAIN:
        return None
    has_retry = any(detail.Unpack(retry) for detail in status.details)
    reason = Reason.__members__.get(info.reason, Reason.INTERNAL)
    if reason is Reason.INVALID_ARGUMENT and "field" in info.metadata:
        field = info.metadata["field"]
        invalid = FieldError(field, status.message.removeprefix(f"{field}: "))
        invalid.metadata.update(info.metadata)
        return invalid
    found = WeftError(
        reason,
        status.message,
        metadata=dict(info.metadata),
        retry_after_seconds=retry.retry_delay.ToNanoseconds() / 1e9 if has_retry else None,
    )
    seen = error_details_pb2.DebugInfo()
    if any(detail.Unpack(seen) for detail in status.details):
        found.engine_exit, found.engine_log = seen.detail, tuple(seen.stack_entries)
    return found


class CallContext:
    """The context of a call to a servicer that is not gRPC's. Errors are raised to the caller unchanged."""

    __slots__ = ("_metadata",)

    def __init__(self, metadata: Sequence[tuple[str, str | bytes]] = ()) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """Returns the metadata of the call."""
        return self._metadata


class DirectContext(CallContext):
    """The context of an in-process call to a servicer."""

    __slots__ = ("write",)

    def __init__(self, metadata: Sequence[tuple[str, str | bytes]] = ()) -> None:
        super().__init__(metadata)
        self.write: Callable[[Any], Awaitable[None]]
        """Sends a message of a streamed answer."""


class answering:  # noqa: N801 - reads as a statement: `async with answering(context):`
    """Wraps the body of an rpc: a WeftError becomes its status, any other exception becomes INTERNAL and is logged."""

    __slots__ = ("_context",)

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any] | CallContext) -> None:
        self._context = context

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, grpc.aio.AbortError):
            return
        if isinstance(self._context, CallContext):
            return
        if not isinstance(error, WeftError):
            log.error("rpc failed unexpectedly", exc_info=error)
            error = WeftError(Reason.INTERNAL, "an internal error; the service's log has the details")
        status = rpc_status.to_status(error_to_status(error))
        # Keep trailing metadata set by the body, such as a receipt.
        trailer = (*(self._context.trailing_metadata() or ()), *status.trailing_metadata)
        await self._context.abort(status.code, status.details, trailing_metadata=trailer)


class AnsweringServicer:
    """Base of servicers: the body of each rpc runs in `answering`. Rpcs that are generators do so themselves."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, method in list(vars(cls).items()):
            if name[0].isupper() and iscoroutinefunction(method):
                setattr(cls, name, _answering(method))


def _answering(method: Callable[RpcT, Awaitable[AnswerT]]) -> Callable[RpcT, Coroutine[Any, Any, AnswerT]]:
    """Wraps an rpc; its last argument is the context."""

    @wraps(method)
    async def rpc(*args: RpcT.args, **kwargs: RpcT.kwargs) -> AnswerT:
        async with answering(cast("grpc.aio.ServicerContext[Any, Any]", args[-1])):
            return await method(*args, **kwargs)
        raise AssertionError("abort raises")

    return rpc


class GenericHandlers:
    """A server for generated code that adds methods by name only.

    Registered handlers would take precedence over a relay or a link in the same process, which forwards calls of the
    same service that name another runner.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, service_name: str, method_handlers: dict[str, Any]) -> None:
        """Does nothing."""
