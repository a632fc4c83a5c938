"""Connections to one HTTP server that are used again only if the server was silent between two answers.

aiohttp keeps what arrives on an idle connection and hands it to the next request as its answer. A server that sends
a second answer (a desynchronised proxy, or one that means harm) would so answer another caller. Bytes that cross the
next request on the wire cannot be distinguished from an answer to it: HTTP/1.1 has no identifier for that.
"""

import select
from functools import partial
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.client_proto import ResponseHandler

if TYPE_CHECKING:
    import asyncio

    from aiohttp.client_reqrep import ClientRequest, ConnectionKey
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace


class _WatchedConnection(ResponseHandler):
    """One connection, which is closed as soon as it receives anything while it is idle."""

    def __init__(self, loop: "asyncio.AbstractEventLoop") -> None:
        super().__init__(loop)
        self._is_idle = False

    def rest(self) -> None:
        """Mark the connection as idle."""
        self._is_idle = True

    def resume(self) -> bool:
        """Mark the connection as in use; returns whether it may be used: it is new, or nothing came in between."""
        was_idle, self._is_idle = self._is_idle, False
        return not was_idle or not (self.should_close or self._has_unread_bytes())

    def data_received(self, data: bytes) -> None:
        """Pass bytes of an answer to the parser. Bytes of an idle connection are dropped, and the connection too."""
        if self._is_idle and data:  # aiohttp calls it without data to go on with what it holds
            self.close()
            return
        super().data_received(data)
        # The answer may have ended within `data`, which released the connection; the rest is then a second answer.
        if self._is_idle and self.should_close:
            self.close()

    def _has_unread_bytes(self) -> bool:
        """Whether bytes, or the end of the connection, wait in the kernel that the event loop has not yet read."""
        found = None if self.transport is None else self.transport.get_extra_info("socket")
        if found is None:
            return False
        poll = select.poll()
        poll.register(found.fileno(), select.POLLIN)
        return bool(poll.poll(0))


class QuietConnector(aiohttp.TCPConnector):
    """A connection pool that gives out no connection on which the server has spoken unasked.

    `_factory` and `_release` are aiohttp's own: its public interface says nothing of a connection's way into the pool.
    `tests/component/runner/test_pooled_connections.py` fails if a new version changes them.
    """

    def __init__(self, *, keepalive_timeout: float) -> None:
        """Connections are not limited in number: the runner's slots do that."""
        super().__init__(limit=0, keepalive_timeout=keepalive_timeout)
        watched: type[ResponseHandler] = _WatchedConnection
        self._factory = partial(watched, loop=self._loop)

    async def connect(
        self, req: "ClientRequest", traces: "list[Trace]", timeout: aiohttp.ClientTimeout
    ) -> "Connection":
        """A connection for one request, from the pool or new."""
        # Ends: each connection that is refused leaves the pool, and a new one is never refused.
        while True:
            connection = await super().connect(req, traces, timeout)
            protocol = connection.protocol
            if not isinstance(protocol, _WatchedConnection) or protocol.resume():
                return connection
            connection.close()

    def _release(self, key: "ConnectionKey", protocol: ResponseHandler, *, should_close: bool = False) -> None:
        if isinstance(protocol, _WatchedConnection):
            protocol.rest()
        super()._release(key, protocol, should_close=should_close)
