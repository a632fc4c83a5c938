"""The HTTP/1.1 protocol of a connection: uvicorn's httptools protocol with additional limits.

Measured: uvicorn 0.54 parses a 60 MB header for 16 s, holds half a header without limit, answers a parse error in plain
text, reports a disconnect to the newest of pipelined requests instead of the running one, adds trailers to the headers
of a running request (a proxy and this server could see different callers), reads the body after an offer of another
protocol as the next request, and answers HTTP/1.0 in chunks.
"""

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn, cast

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway.auth.authentication import OWN_USER_KEY
from gateway.errors import EdgeError, envelope, error_headers, http_status
from gateway.gateway_config import MAX_HEADER_COUNT, ConnectionLimits
from gateway.http.cors import ISOLATED
from gateway.http.disconnect import ABORT_KEY, DISCONNECT_KEY, DisconnectNotifier
from gateway.http.framing import DECLARED_BODY_KEY, MAX_CHUNK_LINE_BYTES, framing_fault, open_chunk_bytes, without_offer
from gateway.http.head_turns import HeadTurns
from weft.kernel.access.peer_user import is_connected, is_own_user
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.open_files import max_connections
from weft.kernel.telemetry.log import get_logger
from weft.kernel.values.names import new_id

MAX_CONNECTIONS_PER_ADDRESS = 256
"""If no setting says otherwise: several times what a browser or an agent's machine opens."""
_NETWORK_BITS = 64
"""Prefix length that counts as one IPv6 address: a network of this size belongs to one household or host."""

_WITHOUT_CHUNKS = frozenset({"0.9", "1.0"})
"""Versions of HTTP without chunks."""

log = get_logger("weft.gateway")


class ConnectionCounts:
    """Counts the open connections of a server. Each `admit` is followed by one `release`."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._most = limits.max_connections
        self._most_per_address = limits.max_connections_per_address or MAX_CONNECTIONS_PER_ADDRESS
        self._by_network: Counter[str] = Counter()
        self._total = 0

    def admit(self, network: str) -> WeftError | None:
        """Counts a connection; returns why it is refused, or None. `network`: of its peer, see `network_of`."""
        self._total += 1
        self._by_network[network] += 1
        if self._total > self._most:
            message = f"more than {self._most} connections (gateway.connections.max_connections)"
            return WeftError(Reason.QUEUE_FULL, message)
        if self._by_network[network] > self._most_per_address and not _is_local(network):
            limit = f"{self._most_per_address} connections from this address"
            message = f"more than {limit} (gateway.connections.max_connections_per_address)"
            return WeftError(Reason.TOO_MANY_RESOURCES, message)
        return None

    def release(self, network: str) -> None:
        """Counts a connection as closed."""
        self._total -= 1
        self._by_network[network] -= 1
        if not self._by_network[network]:
            del self._by_network[network]


def network_of(address: str) -> str:
    """Returns the network of a peer, whose connections are counted and read together; empty for a Unix socket."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        if not found.is_loopback:
            return str(ipaddress.ip_network((found, _NETWORK_BITS), strict=False))
    return str(found)


def _is_local(network: str) -> bool:
    return not network or ipaddress.ip_address(network.partition("/")[0]).is_loopback


def behind_proxy(limits: ConnectionLimits) -> ConnectionLimits:
    """Returns the limits without one per address, unless it is set: a proxy connects for all its callers."""
    return replace(limits, max_connections_per_address=limits.max_connections_per_address or limits.max_connections)


def within_open_files(limits: ConnectionLimits) -> ConnectionLimits:
    """Returns the limits, with at most half of the process's open-file limit as connections."""
    room = max_connections()
    if room is None or limits.max_connections <= room:
        return limits
    log.warning(
        "fewer connections than configured, to leave half of the open files",
        configured=limits.max_connections,
        most=room,
    )
    return replace(limits, max_connections=room)


_HEAD_END = b"\r\n\r\n"
_FRAMING_BYTES = 32
"""Allowed overhead of a chunk: its size line and two line ends."""

_ORDINARY_BODY_BYTES = 10 * 1024 * 1024
"""Larger bodies, such as uploads, may arrive in more segments on a slow network."""
_LARGE_PIECE_BYTES = 1024
"""One more segment is allowed per this many bytes beyond _ORDINARY_BODY_BYTES."""


class EdgeServerConfig(Config):
    """uvicorn's configuration, with the limits and callbacks of `EdgeProtocol`."""

    def __init__(
        self, app: ASGIApp, *, limits: ConnectionLimits, on_refused: Callable[[int], None], **options: Any
    ) -> None:
        super().__init__(app, http=EdgeProtocol, timeout_keep_alive=limits.idle_seconds, **options)
        self.limits = limits
        self.counts = ConnectionCounts(limits)
        self.turns = HeadTurns()
        self.on_refused = on_refused
        self.is_stopping = False
        """Set when the listeners close: each connection then finishes its requests, and answers at most one more."""


class _StoppedError(Exception):
    """Ends parsing from within a callback."""


class EdgeProtocol(HttpToolsProtocol):
    """The protocol of one connection."""

    def __init__(
        self,
        config: EdgeServerConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = config.limits
        self._server_config = config
        self._is_accepted = False
        self._network = ""
        self._waiting: bytes | None = None
        self._head_bytes = 0
        self._is_reading_head = True
        self._body_pieces = 0
        self._body_bytes = 0
        self._overhead_bytes = 0
        self._header_count = 0
        self._is_chunked = False
        self._is_in_chunk = False
        self._chunk_bytes = 0
        self._tail = b""
        self._refusal: WeftError | None = None
        self._is_refused = False
        self._own_user: bool | None = None
        self._running: RequestResponseCycle | None = None
        self._answered = 0.0
        self._head_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Accepts the connection within the connection limits."""
        super().connection_made(transport)
        self._network = network_of(self.client[0] if self.client else "")
        refusal = self._server_config.counts.admit(self._network)
        if refusal is not None:
            self._refuse(refusal)
            transport.close()
        else:
            # Even while the server stops: the connection waited in the listener's backlog, perhaps with its request.
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notifies the running request of the disconnect, even if it is not the newest of a pipeline."""
        running = self._running
        if running is not None and not running.response_complete:
            _notify_disconnect(running)
        _cancel(self._head_timer, self._linger_timer, self.timeout_keep_alive_task)
        self._waiting = None
        self._server_config.counts.release(self._network)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses received bytes; before the first complete head, and after a refusal, when it is this one's turn."""
        if self._is_accepted:
            self._receive(data)
            return
        if self.transport.is_closing():
            return
        if self._waiting is not None:
            # Decrypted before reading was paused.
            self._waiting += data
            return
        turns = self._server_config.turns
        kept = b"" if self._is_refused else self._possible_head(data)
        if turns.take(self.loop) or not turns.wait(self._network, self._receive_waiting, len(kept)):
            self._receive(kept)
        else:
            self._waiting = kept
            self.flow.pause_reading()

    def _possible_head(self, data: bytes) -> bytes:
        """Returns the bytes without those that cannot change that the head is too large."""
        limit = self._limits.max_header_bytes
        is_too_large = not self._head_bytes and len(data) > limit and data.find(_HEAD_END, 0, limit) < 0
        return data[: limit + 1] if is_too_large else data

    def _receive_waiting(self) -> None:
        data, self._waiting = self._waiting, None
        if data is not None and not self.transport.is_closing():
            self.flow.resume_reading()
            self._receive(data)

    def _receive(self, data: bytes) -> None:
        """Parses received bytes, and limits those of heads and trailers."""
        if self._is_refused or self.transport.is_closing():
            return
        if self._is_reading_head:
            self._head_bytes += len(data)
        else:
            self._overhead_bytes += len(data)
        self._parse(data)
        if self._is_reading_head:
            if self._head_bytes and self._head_timer is None:
                self._expect_head()
            self._require_few_bytes(self._head_bytes, "headers")
        else:
            self._require_few_bytes(self._overhead_bytes - _FRAMING_BYTES * self._body_pieces, "trailers")
            if self._is_chunked:
                self._look_at_chunk(data)

    def _parse(self, data: bytes) -> None:
        """Parses received bytes. A head that offers another protocol is parsed again without the offer."""
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserError:
                self.send_400_response("")
                return
            except httptools.HttpParserUpgrade as offer:
                rest = rest[offer.args[0] :]
                if not self._parse_without_offer():
                    return
            else:
                return

    def _parse_without_offer(self) -> bool:
        """Parses the head again at which the parser stopped, without its offer; returns whether that succeeded."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = b"".join(b"%b: %b\r\n" % header for header in without_offer(self.headers))
        # By default, a parser skips everything after a head with `Connection: close`.
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        try:
            self.parser.feed_data(b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, lines))
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.send_400_response("")
            return False
        return True

    def on_message_begin(self) -> None:
        """Start of a request head."""
        super().on_message_begin()
        self._is_reading_head = True
        self._header_count = 0
        state = self.scope["state"]
        state[ABORT_KEY] = self.transport.abort
        state[OWN_USER_KEY] = self._is_own_user
        state[DISCONNECT_KEY] = DisconnectNotifier(self.flow.resume_reading)

    def _is_own_user(self) -> bool:
        """Whether the user that runs this process holds the other end; asked once, while the end is open."""
        if self._own_user is None:
            peer, (host, port) = self.client, self.server or ("", None)
            is_own = peer is not None and port is not None and is_own_user(peer, (host, port))
            # After a reset, another process may have connected from the same port.
            self._own_user = is_own and is_connected(self.transport.get_extra_info("socket"))
        return self._own_user

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handles a header; trailers are counted and dropped."""
        self._header_count += 1
        if self._header_count > MAX_HEADER_COUNT:
            what = "headers" if self._is_reading_head else "trailers"
            limit = MAX_HEADER_COUNT
            self._stop_parsing(EdgeError(431, Reason.REQUEST_TOO_LARGE, f"more than {limit} {what}"))
        if self._is_reading_head:
            # As uvicorn, whose own method would be a second call for each header.
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """End of a request head."""
        fault = framing_fault(self.parser.get_http_version(), self.headers)
        if fault is not None:
            self._stop_parsing(fault)
        if self.parser.should_upgrade():
            # The parser stops here, regardless of the request's framing: see `_parse`.
            return
        self._is_accepted = True
        self._is_reading_head = False
        self._header_count = 0
        self._head_bytes = 0
        self._body_pieces = 0
        self._body_bytes = 0
        self._overhead_bytes = 0
        self._tail = b""
        self._is_chunked = b"transfer-encoding" in dict(self.headers)
        self._is_in_chunk = False
        _cancel(self._head_timer)
        self._head_timer = None
        super().on_headers_complete()
        if self._server_config.is_stopping:
            self.cycle.keep_alive = False

    @property
    def is_idle(self) -> bool:
        """Whether the connection is idle: no request is being read or answered."""
        return self._is_reading_head and (self.cycle is None or self.cycle.response_complete)

    def shutdown(self) -> None:
        """Closes the connection after the current answer. `EdgeServer` closes idle connections."""
        if not self.is_idle:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Handles a part of a body; limits only the number of parts and their overhead."""
        size = len(body)
        self._body_pieces += 1
        self._body_bytes += size
        self._overhead_bytes -= size
        self._chunk_bytes += size
        beyond = max(0, self._body_bytes - _ORDINARY_BODY_BYTES)
        if self._body_pieces > self._limits.max_body_pieces + beyond // _LARGE_PIECE_BYTES:
            message = f"the body arrives in too many chunks (max_body_pieces is {self._limits.max_body_pieces})"
            self._stop_parsing(WeftError(Reason.REQUEST_TOO_LARGE, message))
        super().on_body(body)

    def on_chunk_header(self) -> None:
        """Start of a chunk of a body."""
        self._is_in_chunk = True
        self._chunk_bytes = 0

    def on_chunk_complete(self) -> None:
        """End of a chunk of a body."""
        self._is_in_chunk = False

    def on_message_complete(self) -> None:
        """End of a request; the next bytes belong to another head."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._is_reading_head = True
        _cancel(self._linger_timer)
        self._linger_timer = None

    def on_response_complete(self) -> None:
        """End of a response. The rest of the request is read and dropped for `linger_seconds`."""
        if not self._is_reading_head and not self.transport.is_closing():
            self._linger()
        self._answered = self.loop.time()
        if self.timeout_keep_alive_task is None or self.pipeline:
            super().on_response_complete()
        elif not self.transport.is_closing():
            self.flow.resume_reading()

    def _unset_keepalive_if_required(self) -> None:
        """Keeps the timer, because setting one for each answer takes ten calls: see `timeout_keep_alive_handler`."""

    def timeout_keep_alive_handler(self) -> None:
        """Closes the connection after `idle_seconds` without a request; aborts it if its peer has not read the answer.

        While a request is read or answered, there is no timer: its answer sets one.
        """
        self.timeout_keep_alive_task = None
        if self._head_bytes or not self.is_idle:
            return
        seconds = self._answered + self.timeout_keep_alive - self.loop.time()
        if seconds > 0:
            self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)
        elif self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - the parser's message is for its log
        """Answers a parse error with the error envelope."""
        self._refuse(self._refusal or WeftError(Reason.MALFORMED_REQUEST, "this is not a valid HTTP request"))

    def _stop_parsing(self, refusal: WeftError) -> NoReturn:
        """Ends parsing from within a callback; `send_400_response` then sends the refusal."""
        self._refusal = refusal
        # Raised itself, it would be in a reference cycle with its traceback, which holds all that was just read.
        raise _StoppedError

    def _look_at_chunk(self, data: bytes) -> None:
        """Publishes the body's minimum length to its reader: the rest of a chunk that is too large may never arrive."""
        received = self._tail + data
        self._tail = received[-MAX_CHUNK_LINE_BYTES:]
        if self._is_in_chunk and self._running is self.cycle:
            coming = open_chunk_bytes(received, self._chunk_bytes) - self._chunk_bytes
            state = self.scope["state"]
            if coming > 0 and state.get(DECLARED_BODY_KEY, 0) < self._body_bytes + coming:
                state[DECLARED_BODY_KEY] = self._body_bytes + coming
                self.cycle.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        served = self._lingering(app, cycle)
        if cycle.scope["http_version"] in _WITHOUT_CHUNKS:
            served = _without_chunks(served, cycle)
        super()._start_asgi_task(cycle, cast("Any", served))

    def _lingering(self, app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
        """Returns an application whose answer does not close the connection while its request still arrives."""

        def serve(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
            async def send_and_linger(message: Message) -> None:
                is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
                is_early = is_last and cycle.more_body and not cycle.keep_alive
                if is_early:
                    # uvicorn closes the connection before it calls `on_response_complete`.
                    cycle.keep_alive = True
                await send(message)
                if is_early and not self.transport.is_closing():
                    self._end_input()

            return app(scope, receive, send_and_linger)

        return serve

    def _require_few_bytes(self, count: int, what: str) -> None:
        limit = self._limits.max_header_bytes
        if count > limit:
            self._refuse(EdgeError(431, Reason.REQUEST_TOO_LARGE, f"more than {limit} bytes of {what}"))

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.header_timeout_seconds, self._head_is_late)

    def _linger(self) -> None:
        self._linger_timer = self.loop.call_later(self._limits.linger_seconds, self.transport.abort)

    def _head_is_late(self) -> None:
        limit = self._limits.header_timeout_seconds
        self._refuse(EdgeError(408, Reason.DEADLINE_EXCEEDED, f"no complete head within {limit:g} seconds"))

    def _refuse(self, error: WeftError) -> None:
        """Answers without the application and drops further input; aborts the connection if a response has started."""
        running = self._running
        if self._is_refused or self.transport.is_closing():
            return
        if running is not None and not running.response_complete:
            if running.response_started:
                self.transport.abort()
                return
            _notify_disconnect(running)
        self._server_config.on_refused(http_status(error))
        request_id = new_id("req")
        log.info("refused", request_id=request_id, reason=error.reason.name.lower(), message=error.log_message)
        body = envelope(error, request_id)
        headers = [
            *error_headers(error, body),
            *ISOLATED,
            (b"x-request-id", request_id.encode("ascii")),
            (b"connection", b"close"),
        ]
        head = b"".join(b"%b: %b\r\n" % header for header in headers)
        self.transport.write(b"HTTP/1.1 %d \r\n%b\r\n%b" % (http_status(error), head, body))
        self._end_input()
        self._linger()

    def _end_input(self) -> None:
        """Drops further input after the last answer. The caller lingers.

        Closing with unread input would reset the connection, and the peer might not see the answer.
        """
        self._is_refused = True
        self._is_accepted = False
        if self.transport.can_write_eof():
            with suppress(OSError):  # The peer may have closed meanwhile.
                self.transport.write_eof()
        self._forget_head()

    def _forget_head(self) -> None:
        """Drops a refused head while the connection lingers: it may be as long as one read, 256 KiB."""
        self.parser = httptools.HttpRequestParser(self)
        self.headers, self.url = [], b""
        self.scope = cast("Any", None)  # As before the first head.


def _without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Returns an application that answers without chunks: the end of the connection ends the answer."""
    cycle.chunked_encoding = False
    cycle.waiting_for_100_continue = False

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_plain(message: Message) -> None:
            # uvicorn tracks the remaining bytes of a declared length.
            cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return serve


def _notify_disconnect(running: RequestResponseCycle) -> None:
    running.disconnected = True
    running.message_event.set()
    running.scope["state"][DISCONNECT_KEY].happen()


def _cancel(*timers: asyncio.TimerHandle | None) -> None:
    for timer in timers:
        if timer is not None:
            timer.cancel()
