"""HTTP client of one server, with a pool of connections."""

import asyncio
import base64
import select
import ssl
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from aiohappyeyeballs import start_connection
from typing_extensions import override
from yarl import URL

from runner_svc.engine_http.answer import Answer
from runner_svc.engine_http.faults import ClosedClientError, Unconnected, UnconnectedError, unconnected
from weft.kernel.channels.outbound import ForbiddenAddressError, Outbound

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner_svc.engine_http.faults import HttpFaultError
    from runner_svc.supervise.peer_process import VerifyPeer


class EngineConnection(asyncio.Protocol):
    """A connection; it is idle without a response."""

    def __init__(
        self, on_rest: "Callable[[EngineConnection], None]", on_end: "Callable[[EngineConnection], None]"
    ) -> None:
        """`on_rest` is called when it becomes idle and reusable, `on_end` when it has ended."""
        self.idle_since = 0.0
        self._on_rest, self._on_end = on_rest, on_end
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._poll: select.poll | None = None
        self._is_paused = False

    def ask(self, request: bytes, body: bytes) -> Answer:
        """Sends a request; returns its pending response."""
        answer = self._answer = Answer(self._resume, self._release)
        transport = self._transport
        if transport is None or transport.is_closing():
            answer.lose(None)
        elif body:
            transport.writelines((request, body))
        else:
            transport.write(request)
        return answer

    async def verify(self, verify: "VerifyPeer") -> None:
        """Returns once `verify` has accepted the other end; closes the connection if it raises."""
        try:
            if self._transport is not None:
                await verify(self._transport)
        except BaseException:
            self.abort()
            raise

    @property
    def has_ended(self) -> bool:
        """Whether the connection has ended."""
        return self._transport is None

    def may_be_used(self) -> bool:
        """Whether an idle connection can send a request: it is open, and nothing arrived while it was idle."""
        transport = self._transport
        return transport is not None and not transport.is_closing() and not self._has_unread_bytes()

    def abort(self, fault: "HttpFaultError | None" = None) -> None:
        """Closes the connection immediately. `fault` ends a pending response."""
        answer, self._answer = self._answer, None
        if answer is not None and fault is not None:
            answer.fail(fault)
        if self._transport is not None:
            self._transport.abort()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    @override
    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            self.abort()  # unsolicited data
            return
        if answer.feed(data) and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        answer, self._transport = self._answer, None
        if answer is not None:
            answer.lose(exc)
        self._on_end(self)

    def _resume(self) -> None:
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()

    def _release(self, answer: Answer) -> None:
        if self._answer is not answer:
            return
        if answer.is_complete and answer.keeps_connection and not answer.is_followed:
            self._answer = None
            self._resume()
            self._on_rest(self)
        else:
            self.abort()

    def _has_unread_bytes(self) -> bool:
        """Whether the kernel holds bytes, or an end of the connection, that the event loop has not read."""
        if self._poll is None:
            found = None if self._transport is None else self._transport.get_extra_info("socket")
            if found is None:
                return False
            self._poll = select.poll()
            self._poll.register(found.fileno(), select.POLLIN)
        return bool(self._poll.poll(0))


MAX_IDLE_CONNECTIONS = 256
"""Maximum number of idle connections. The runner's slots limit those in use."""
NEXT_ADDRESS_SECONDS = 0.25
"""Delay before the next address of a name is tried concurrently, as RFC 8305 proposes."""
_GET = "GET"


class EngineClient:
    """HTTP/1.1 client of one server over TCP, TLS or a Unix socket, without proxies, cookies and redirects.

    Only connecting has a timeout; callers limit everything else.
    """

    def __init__(
        self,
        base_url: str,
        *,
        socket_path: str = "",
        headers: Mapping[str, str],
        connect_seconds: float,
        idle_seconds: float,
        verify: "VerifyPeer | None" = None,
    ) -> None:
        """`headers` are sent with every request. `idle_seconds`: maximum idle time of a connection.

        `verify` checks the other end of a new connection to an engine that weft started, before anything is sent. None:
        the address comes from a user, and is checked.
        """
        url = URL(base_url)
        self._host, self._port = url.raw_host or "", url.port or 0
        self._socket_path = socket_path
        self._tls = _tls() if url.scheme == "https" else None
        self._prefix = url.raw_path.rstrip("/")
        host = url.raw_authority.rpartition("@")[2]
        self._headers = {"Host": host, "Accept": "*/*", **_user(url), **headers}
        self._own_headers = _lines(self._headers)
        _require_lines(self._own_headers, len(self._headers))
        self._connect_seconds = connect_seconds
        self._idle_seconds = idle_seconds
        self._verify = verify
        self._idle: list[EngineConnection] = []
        self._all: set[EngineConnection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"", *, fresh: bool = False
    ) -> Answer:
        """Sends a request; returns its response once the head has arrived. The caller must release it.

        `path` is encoded and relative to the base URL. `fresh`: use a new connection. Raises HttpFaultError; closes the
        connection if cancelled.
        """
        head = self._head(method, path, headers, len(body))
        connection = (None if fresh else self._take_idle()) or await self._connect()
        answer = connection.ask(head, body)
        try:
            await answer.head()
        except BaseException:
            connection.abort()
            raise
        return answer

    def close(self) -> None:
        """Closes all connections immediately. Idempotent."""
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in tuple(self._all):
            connection.abort(ClosedClientError())

    def _head(self, method: str, path: str, headers: Mapping[str, str], length: int) -> bytes:
        others = self._own_headers
        if not headers.keys().isdisjoint(self._headers):
            others = _lines({name: value for name, value in self._headers.items() if name not in headers})
        framing = f"Content-Length: {length}\r\n" if length or method != _GET else ""
        own = f"{method} {self._prefix}{path} HTTP/1.1\r\n{_lines(headers)}"
        _require_lines(own, len(headers) + 1)
        return f"{own}{framing}{others}\r\n".encode()

    def _take_idle(self) -> EngineConnection | None:
        idle = self._idle
        while idle:
            connection = idle.pop()
            if connection.may_be_used():
                return connection
            connection.abort()
        return None

    async def _connect(self) -> EngineConnection:
        self._require_open()
        try:
            async with asyncio.timeout(self._connect_seconds):
                connection = await self._open()
        except ForbiddenAddressError as error:
            raise UnconnectedError(Unconnected.FORBIDDEN, str(error)) from None
        except (OSError, ValueError) as error:  # ValueError: an invalid host name
            raise unconnected(error) from error
        if not connection.has_ended:
            self._all.add(connection)
        try:
            self._require_open()
        except ClosedClientError:
            connection.abort()
            raise
        if self._verify is not None:
            # Without the timeout: a busy server with one thread accepts late.
            try:
                await connection.verify(self._verify)
            except OSError as error:
                raise unconnected(error) from error
        return connection

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedClientError

    async def _open(self) -> EngineConnection:
        loop = asyncio.get_running_loop()
        if self._socket_path:
            return (await loop.create_unix_connection(self._new, self._socket_path))[1]
        server_name = self._host if self._tls is not None else None
        if self._verify is not None:
            opening = loop.create_connection(
                self._new, self._host, self._port, ssl=self._tls, server_hostname=server_name
            )
            return (await opening)[1]
        found = await asyncio.to_thread(Outbound().resolve, self._host, self._port)
        sock = await start_connection(found, happy_eyeballs_delay=NEXT_ADDRESS_SECONDS, interleave=1)
        try:
            opening = loop.create_connection(self._new, sock=sock, ssl=self._tls, server_hostname=server_name)
            return (await opening)[1]
        except BaseException:
            with suppress(OSError):
                sock.close()
            raise

    def _new(self) -> EngineConnection:
        return EngineConnection(self._rest, self._forget)

    def _rest(self, connection: EngineConnection) -> None:
        loop = asyncio.get_running_loop()
        if self._is_closed or len(self._idle) >= MAX_IDLE_CONNECTIONS:
            connection.abort()
            return
        connection.idle_since = loop.time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(self._idle_seconds, self._close_idle)

    def _close_idle(self) -> None:
        """Closes the connections that were idle for too long; the list starts with the longest idle."""
        loop = asyncio.get_running_loop()
        self._sweep = None
        limit = loop.time() - self._idle_seconds
        while self._idle and self._idle[0].idle_since <= limit:
            self._idle.pop(0).abort()
        if self._idle:
            self._sweep = loop.call_at(self._idle[0].idle_since + self._idle_seconds, self._close_idle)

    def _forget(self, connection: EngineConnection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


def _lines(headers: Mapping[str, str]) -> str:
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()])


def _require_lines(head: str, count: int) -> None:
    """Raises ValueError if a value contains a line break, which would start another header."""
    if head.count("\r") + head.count("\n") != 2 * count or "\0" in head:
        raise ValueError("a header has a line break")


def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _user(url: URL) -> dict[str, str]:
    """Returns the Authorization header for the credentials in a URL; empty: it has none."""
    if url.user is None:
        return {}
    words = f"{url.user}:{url.password or ''}".encode()
    return {"Authorization": f"Basic {base64.b64encode(words).decode()}"}
