"""The server: connections of this machine on the event loop, and the handlers that gRPC's own server would call.

For streams of a few small messages it takes a fraction of the CPU time of gRPC's own: bench/results/2026-11-23-lane.md.
It is for callers of this machine, which are trusted as far as bytes go: it has no TLS, sends no pings, and does not
defend itself against floods of calls that are begun and left.
"""

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import isasyncgenfunction
from typing import Any, cast
from urllib.parse import quote

import grpc
from typing_extensions import override

from weft.kernel.address import is_address, is_loopback
from weft.kernel.log import get_logger
from weft.kernel.rpc import MAX_MESSAGE_BYTES, MAX_METADATA_BYTES
from weft.kernel.rpc_server.connection import BrokenConnectionError, Connection
from weft.kernel.rpc_server.hpack import Headers

log = get_logger("weft.rpc")

MAX_CALLS = 16_384
"""Calls of one connection at once. A proxy opens another connection, or waits."""
MAX_UNREAD_BYTES = 2 * MAX_MESSAGE_BYTES
"""Of one call; one with more is reset."""


class _Aborted(Exception):  # noqa: N818 - how a handler ends its call, and no error
    """The end of a call by its handler."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status
        self.words = words


@dataclass(frozen=True, slots=True)
class _CallDetails(grpc.HandlerCallDetails):
    """What a handler is looked up by."""

    method: str
    invocation_metadata: tuple[tuple[str, str | bytes], ...] = ()


class _Call:
    """One call: the context that its handler is given."""

    def __init__(self, peer: "_Peer", stream: int, headers: Headers, handler: Any) -> None:
        self._peer = peer
        self._stream = stream
        self._headers = headers
        self._handler = handler
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self._has_ended = False
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None] | None = None

    # What a handler calls.

    async def read(self) -> Any:
        """Returns the next message; `grpc.aio.EOF` where none follows, also because the caller has left."""
        while not self._unread:
            if self._has_ended:
                return grpc.aio.EOF
            self._reader = self._peer.loop.create_future()
            await self._reader
        payload = self._unread.popleft()
        self._unread_bytes -= len(payload)
        deserialize = self._handler.request_deserializer
        return payload if deserialize is None else deserialize(payload)

    async def write(self, message: Any) -> None:
        """Sends a message; waits while the peer takes none."""
        serialize = self._handler.response_serializer
        self._peer.send(self._stream, message if serialize is None else serialize(message))
        while self._peer.is_paused(self._stream):
            self._writer = self._peer.loop.create_future()
            await self._writer

    async def abort(self, code: grpc.StatusCode, details: str = "", _trailers: object = ()) -> None:
        """Ends the call with a status. Raises what ends the handler."""
        raise _Aborted(code.value[0], details)

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        """Returns the headers of the call."""
        return tuple(
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in self._headers if name[:1] != b":"
        )

    def peer(self) -> str:
        """Returns the caller's address in gRPC's form."""
        return self._peer.address

    def cancelled(self) -> bool:
        """Whether the caller has left."""
        return not self._peer.is_open(self._stream)

    # What the connection calls.

    def note_message(self, payload: bytes) -> bool:
        """Keeps a message until it is read; returns whether there was room for it."""
        self._unread.append(payload)
        self._unread_bytes += len(payload)
        self._wake_reader()
        return self._unread_bytes <= MAX_UNREAD_BYTES

    def note_end(self) -> None:
        """Note that no message follows."""
        self._has_ended = True
        self._wake_reader()

    def note_resumed(self) -> None:
        """Note that the peer takes messages again."""
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    def note_reset(self) -> None:
        """End a call whose caller has left: its handler reads the end; one that does not read is cancelled."""
        is_reading = self._reader is not None and not self._reader.done()
        self._unread.clear()
        self.note_end()
        self.note_resumed()
        if self.task is not None and not is_reading:
            self.task.cancel()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def serve(self) -> None:
        """Runs the handler and ends the call."""
        try:
            await self._handle()
        except _Aborted as end:
            self._peer.end(self._stream, end.status, end.words)
        except asyncio.CancelledError:
            self._peer.end(self._stream, grpc.StatusCode.CANCELLED.value[0], "")
            raise
        except Exception as error:
            log.exception("a call failed", method=_path_of(self._headers))
            self._peer.end(self._stream, grpc.StatusCode.UNKNOWN.value[0], f"Unexpected {type(error).__name__}")
        else:
            self._peer.end(self._stream, 0, "")

    async def _handle(self) -> None:
        handler = self._handler
        if handler.request_streaming:
            request: Any = self._requests()
        elif (request := await self.read()) is grpc.aio.EOF:
            raise _Aborted(grpc.StatusCode.INVALID_ARGUMENT.value[0], "the call has no request")
        function = _function_of(handler)
        if isasyncgenfunction(function):
            async for each in function(request, self):
                await self.write(each)
            return
        result = await function(request, self)
        if not handler.response_streaming:
            await self.write(result)

    async def _requests(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message


def _function_of(handler: Any) -> Callable[[Any, _Call], Any]:
    if handler.request_streaming:
        found = handler.stream_stream if handler.response_streaming else handler.stream_unary
    else:
        found = handler.unary_stream if handler.response_streaming else handler.unary_unary
    return found  # type: ignore[no-any-return]  # a named tuple of gRPC's


class _Peer(asyncio.Protocol):
    """One connection."""

    def __init__(self, server: "LocalServer", loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._server = server
        self._calls: dict[int, _Call] = {}
        self._connection = Connection(
            self, max_streams=MAX_CALLS, max_message_bytes=MAX_MESSAGE_BYTES, max_header_bytes=MAX_METADATA_BYTES
        )
        self._transport: asyncio.Transport | None = None
        self.address = ""
        """Of its caller, such as `ipv4:127.0.0.1:40000`."""
        self._is_sending = False
        self._is_full = False
        """Whether the transport takes no more for now."""

    # The transport's side.

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are no subclass.
        self._transport = cast("asyncio.Transport", transport)
        # None: it has hung up already.
        host, port, *_ = transport.get_extra_info("peername") or ("127.0.0.1", 0)
        self.address = f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
        self._server.peers.add(self)
        self._send_soon()

    @override
    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._server.peers.discard(self)
        self._server.note_lost(self.address)
        for call in list(self._calls.values()):
            call.note_reset()
        self._calls.clear()

    @override
    def data_received(self, data: bytes) -> None:
        try:
            self._connection.receive(data)
        except BrokenConnectionError as error:
            log.warning("a connection broke the protocol of gRPC", error=str(error))
            self._send()
            if self._transport is not None:
                self._transport.close()
            return
        if self._connection.has_output:
            self._send_soon()

    @override
    def pause_writing(self) -> None:
        self._is_full = True

    @override
    def resume_writing(self) -> None:
        self._is_full = False
        for call in self._calls.values():
            call.note_resumed()

    # The connection's side: see `Calls`.

    def opened(self, stream: int, headers: Headers) -> None:
        """See `Calls.opened`."""
        handler = self._server.handler_of(headers)
        if handler is None:
            self.end(stream, grpc.StatusCode.UNIMPLEMENTED.value[0], "Method not found!")
            return
        call = self._calls[stream] = _Call(self, stream, headers, handler)
        # It begins with the next turn of the event loop, when what came with its head has arrived, too.
        call.task = self._server.start_call(call.serve())

    def message(self, stream: int, payload: bytes) -> None:
        """See `Calls.message`."""
        call = self._calls.get(stream)
        if call is not None and not call.note_message(payload):
            self._connection.reset(stream)
            self.reset(stream)

    def half_closed(self, stream: int) -> None:
        """See `Calls.half_closed`."""
        if (call := self._calls.get(stream)) is not None:
            call.note_end()

    def reset(self, stream: int) -> None:
        """See `Calls.reset`."""
        if (call := self._calls.pop(stream, None)) is not None:
            call.note_reset()

    def resumed(self, stream: int) -> None:
        """See `Calls.resumed`."""
        if (call := self._calls.get(stream)) is not None:
            call.note_resumed()

    # The calls' side.

    def is_open(self, stream: int) -> bool:
        """Whether a call may still be answered."""
        return self._transport is not None and self._connection.is_open(stream)

    def is_paused(self, stream: int) -> bool:
        """Whether a call has written more than its peer takes."""
        return self.is_open(stream) and (self._is_full or self._connection.is_paused(stream))

    def send(self, stream: int, payload: bytes) -> None:
        """Sends a message of a call, with everything else of this turn of the event loop."""
        self._connection.send(stream, payload)
        self._send_soon()

    def end(self, stream: int, status: int, words: str) -> None:
        """Ends a call."""
        self._calls.pop(stream, None)
        self._connection.end(stream, status, quote(words, safe=" !#$&'()*+,-./:;<=>?@[]^_`{|}~").encode())
        self._send_soon()

    def leave(self) -> None:
        """Say that no further calls are taken."""
        self._connection.leave()
        self._send_soon()

    def close(self) -> None:
        """Close the connection once what is left is sent."""
        self._send()
        if self._transport is not None:
            self._transport.close()

    def _send_soon(self) -> None:
        if not self._is_sending:
            self._is_sending = True
            self.loop.call_soon(self._send)

    def _send(self) -> None:
        self._is_sending = False
        if self._transport is not None and self._connection.has_output:
            self._transport.write(self._connection.take_output())


def takes(address: str) -> bool:
    """Whether a `LocalServer` can listen at an address: loopback, by its number."""
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    return is_address(host) and is_loopback(host)


class LocalServer(grpc.aio.Server):
    """A gRPC server on one TCP address of this machine."""

    def __init__(self) -> None:
        self.peers: set[_Peer] = set()
        """Its connections."""
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._found: dict[bytes, Any] = {}
        self._sockets: list[socket.socket] = []
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._on_lost: list[Callable[[str], None]] = []

    @override
    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        self._handlers.extend(generic_rpc_handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        """Adds nothing: generated code adds the same methods as generic handlers, too."""

    @override
    def add_insecure_port(self, address: str) -> int:
        """Listens. Raises RuntimeError where the address is in use, as gRPC's own server does."""
        if not takes(address):
            raise ValueError(f"{address} is not of this machine alone")
        host, _, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            found = socket.create_server((host, int(port)), family=family, backlog=socket.SOMAXCONN)
        except OSError as error:
            raise RuntimeError(f"cannot listen on {address}: {error}") from error
        self._sockets.append(found)
        return int(found.getsockname()[1])

    @property
    def addresses(self) -> Sequence[str]:
        """Where it listens."""
        return [f"{host}:{port}" for host, port, *_ in (each.getsockname() for each in self._sockets)]

    @override
    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        raise NotImplementedError("it serves this machine alone, in plaintext")

    @override
    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        for each in self._sockets:
            self._servers.append(await loop.create_server(lambda: _Peer(self, loop), sock=each))

    @override
    async def stop(self, grace: float | None) -> None:
        """Takes no further calls, and ends those that are left after the grace. Idempotent."""
        for server in self._servers:
            server.close()
        for each in self._sockets:
            each.close()
        for peer in list(self.peers):
            peer.leave()
        if self._tasks and grace:
            await asyncio.wait(self._tasks, timeout=grace)
        left = list(self._tasks)
        for task in left:
            task.cancel()
        for task in left:
            with suppress(asyncio.CancelledError):
                await task
        for peer in list(self.peers):
            peer.close()
        self._ended.set()

    @override
    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        try:
            await asyncio.wait_for(self._ended.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def watch_connections(self, on_lost: Callable[[str], None]) -> None:
        """Calls `on_lost` for each connection that ends, with the address that `peer()` of its calls has."""
        self._on_lost.append(on_lost)

    def note_lost(self, address: str) -> None:
        """Note the end of a connection."""
        for on_lost in self._on_lost:
            on_lost(address)

    def handler_of(self, headers: Headers) -> Any:
        """Returns the handler of a call; None: there is none."""
        path = _path_of(headers)
        if path not in self._found:
            details = _CallDetails(path.decode("latin-1"))
            found = next((each for each in (one.service(details) for one in self._handlers) if each is not None), None)
            if found is None:
                # Not kept: callers could ask for any name.
                return None
            self._found[path] = found
        return self._found[path]

    def start_call(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a call."""
        task = asyncio.create_task(work, name="rpc")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _path_of(headers: Headers) -> bytes:
    return next((value for name, value in headers if name == b":path"), b"")
