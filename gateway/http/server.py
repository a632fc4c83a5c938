"""uvicorn inside somebody else's event loop: no signal handlers, no exit of the process, a stop that keeps its word."""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Generator
from socket import socket

import uvicorn

from gateway.config import EdgeTls
from gateway.http.protocol import EdgeProtocol, EdgeServerConfig

_DATE_INTERVAL_SECONDS = 1.0
# After the cancellation, how long answers and connections may take to end.
_LAST_WORDS_SECONDS = 2.0
_POLL_SECONDS = 0.005


class EdgeServer(uvicorn.Server):
    """Serves until told to stop."""

    def __init__(self, config: EdgeServerConfig, tls: tuple[ssl.SSLContext, EdgeTls] | None = None) -> None:
        """Without `tls` it speaks plain HTTP."""
        super().__init__(config)
        self._edge_config = config
        self._tls = tls
        self._stopping = asyncio.Event()
        self._started = asyncio.Event()
        self._grace_seconds = 0.0

    def request_stop(self, grace_seconds: float) -> None:
        """Stop accepting now; running requests have `grace_seconds`. `serve` returns when all is over."""
        self._grace_seconds = grace_seconds
        self.should_exit = True
        self._stopping.set()

    async def wait_started(self) -> None:
        """Return once connections are accepted."""
        await self._started.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Signals belong to the host process."""
        yield

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """See uvicorn.Server."""
        if self._tls is None:
            await super().startup(sockets)
        else:
            await self._startup_with_tls(sockets or [], *self._tls)
        self._started.set()

    async def _startup_with_tls(self, sockets: list[socket], context: ssl.SSLContext, tls: EdgeTls) -> None:
        """What uvicorn does, with a bound for handshakes: it leaves a client a minute, and has no setting for it."""
        await self.lifespan.startup()
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                self._protocol,
                sock=listener,
                ssl=context,
                ssl_handshake_timeout=tls.handshake_timeout_seconds,
                backlog=self._edge_config.backlog,
            )
            for listener in sockets
        ]
        self.started = True

    def _protocol(self) -> asyncio.Protocol:
        config = self._edge_config
        return EdgeProtocol(config, self.server_state, self.lifespan.state)

    async def main_loop(self) -> None:
        """Keep the Date header right until stop is requested; uvicorn's own loop polls ten times a second."""
        while not self._stopping.is_set():
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DATE_INTERVAL_SECONDS):
                    await self._stopping.wait()

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Close the listeners, let requests finish, cancel those that do not, close what is left."""
        self._edge_config.is_stopping = True
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if not await self._requests_end(self._grace_seconds):
            for task in list(self.server_state.tasks):
                task.cancel()
            await self._requests_end(_LAST_WORDS_SECONDS)
        await self._connections_end()

    async def _requests_end(self, seconds: float) -> bool:
        """Whether every request ended within `seconds`; a finished one may start the next of its pipeline."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.server_state.tasks:
                    await asyncio.wait(list(self.server_state.tasks))
        return not self.server_state.tasks

    async def _connections_end(self) -> None:
        """Close every connection; one whose peer does not read its last bytes is cut."""
        for connection in list(self.server_state.connections):
            connection.transport.close()
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        # uvicorn keeps a bare set of its connections, so there is nothing to wait on.
        while self.server_state.connections and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
