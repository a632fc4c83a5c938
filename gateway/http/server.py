"""The HTTP server: uvicorn in the host's event loop, without signal handlers, with a bounded stop."""

import asyncio
import contextlib
import errno
import ipaddress
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from starlette.types import ASGIApp
from typing_extensions import override
from uvicorn import Server

from gateway.gateway_config import HANDSHAKE_TIMEOUT_SECONDS, ConnectionLimits, Exposure
from gateway.http.protocol import EdgeProtocol, EdgeServerConfig, behind_proxy, within_open_files
from gateway.http.tls import server_context
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import start_critical
from weft.kernel.telemetry.log import get_logger

_DATE_INTERVAL_SECONDS = 1.0
# How long idle connections stay open after the listeners, since their callers may just have sent a request. nginx does
# the same (keepalive_min_timeout).
_LAST_REQUEST_SECONDS = 0.25
# Time for answers and connections to end after their cancellation.
_FINAL_WRITES_SECONDS = 2.0
_POLL_SECONDS = 0.005
_BACKLOG = 2048
"""Maximum number of connections that wait to be accepted."""
_ACCEPTED_PER_TURN = 4
"""Maximum number of connections that are accepted before other requests run."""
_STARTING_TURNS = 3
"""Turns within which any event loop starts the protocol of an accepted connection."""


class EdgeServer(Server):
    """Serves until `request_stop`."""

    def __init__(self, config: EdgeServerConfig, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: None: plain HTTP."""
        super().__init__(config)
        self._edge_config = config
        self._tls = tls
        self._stopping = asyncio.Event()
        self._started = asyncio.Event()
        self._grace_seconds = 0.0

    def request_stop(self, grace_seconds: float) -> None:
        """Stops accepting now; running requests have `grace_seconds`. `serve` returns when all have ended."""
        self._grace_seconds = grace_seconds
        self.should_exit = True
        self._stopping.set()

    async def wait_started(self) -> None:
        """Returns once connections are accepted."""
        await self._started.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Does nothing: signals belong to the host process."""
        yield

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts as uvicorn does, except that connections are accepted a few at a time, with a handshake timeout."""
        await self.lifespan.startup()
        loop = asyncio.get_running_loop()
        self.servers = []
        for listener in sockets or ():
            if listener.family == socket.AF_UNIX:
                server = await loop.create_unix_server(self._protocol, sock=listener, backlog=_ACCEPTED_PER_TURN)
            else:
                server = await loop.create_server(
                    self._protocol,
                    sock=listener,
                    ssl=self._tls,
                    ssl_handshake_timeout=None if self._tls is None else HANDSHAKE_TIMEOUT_SECONDS,
                    backlog=_ACCEPTED_PER_TURN,
                )
            # asyncio uses one number for both.
            listener.listen(_BACKLOG)
            self.servers.append(server)
        self.started = True
        self._started.set()

    def _protocol(self) -> asyncio.Protocol:
        config = self._edge_config
        return EdgeProtocol(config, self.server_state, self.lifespan.state)

    async def main_loop(self) -> None:
        """Updates the Date header until stop is requested; uvicorn's own loop polls ten times a second."""
        while not self._stopping.is_set():
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DATE_INTERVAL_SECONDS):
                    await self._stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes the listeners, lets requests finish, cancels the rest, closes all connections.

        No request is lost: connections in the backlog are accepted first, and idle ones get time for a last request.
        """
        self._edge_config.is_stopping = True
        # Accepts the backlog. Later connections are refused, and can go to another gateway.
        for _ in range(_BACKLOG):
            if not _has_backlog(sockets or ()):
                break
            await asyncio.sleep(0)
        for _ in range(_STARTING_TURNS):
            await asyncio.sleep(0)
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        self._edge_config.turns.end()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._idle_end()
        if not await self._requests_end(self._grace_seconds):
            for task in list(self.server_state.tasks):
                task.cancel()
            await self._requests_end(_FINAL_WRITES_SECONDS)
        await self._connections_end()

    async def _idle_end(self) -> None:
        """Closes idle connections, after a moment for their last request."""
        deadline = time.monotonic() + _LAST_REQUEST_SECONDS
        while self._idle() and time.monotonic() < deadline:  # noqa: ASYNC110 - as in `_connections_end`
            await asyncio.sleep(_POLL_SECONDS)
        for connection in self._idle():
            connection.transport.close()

    def _idle(self) -> list[EdgeProtocol]:
        connections = (each for each in self.server_state.connections if isinstance(each, EdgeProtocol))
        return [connection for connection in connections if connection.is_idle]

    async def _requests_end(self, seconds: float) -> bool:
        """Whether every request ended within `seconds`; a finished one may start the next of its pipeline."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.server_state.tasks:
                    await asyncio.wait(list(self.server_state.tasks))
        return not self.server_state.tasks

    async def _connections_end(self) -> None:
        """Closes every connection; aborts those whose peer does not read the last bytes."""
        for connection in list(self.server_state.connections):
            connection.transport.close()
        deadline = time.monotonic() + _FINAL_WRITES_SECONDS
        # uvicorn's set of connections has no event to wait for.
        while self.server_state.connections and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _has_backlog(listeners: Sequence[socket.socket]) -> bool:
    """Whether a connection waits to be accepted."""
    with selectors.DefaultSelector() as selector:
        for listener in listeners:
            selector.register(listener, selectors.EVENT_READ)
        return bool(selector.select(0))


log = get_logger("weft.gateway")


class AppServer:
    """Serves an ASGI application. Life cycle: start, request_stop, wait_stopped; each may be repeated."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        exposure: Exposure,
        limits: ConnectionLimits,
        on_refused: Callable[[int], None],
        name: str = "gateway",
        port_option: str = "--port",
        socket_path: Path | None = None,
    ) -> None:
        """`port_option`: the option that sets the port, for error messages.

        `socket_path`: serves plain HTTP on this Unix socket instead of a port. `on_refused` is called with the status
        of each request that is refused before the application.
        """
        self._app = app
        self._exposure = exposure
        self._limits = behind_proxy(limits) if exposure.tls_terminated_elsewhere else limits
        self._on_refused = on_refused
        self._name = name
        self._port_option = port_option
        self._socket_path = socket_path
        self._server: EdgeServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._address: tuple[str, int] | None = None

    @property
    def port(self) -> int:
        """The listening port; the configured one before the start."""
        return self._exposure.port if self._address is None else self._address[1]

    @property
    def url(self) -> str:
        """The server's URL, such as `http://127.0.0.1:8080`."""
        scheme = "http" if self._exposure.tls is None else "https"
        host = self._exposure.host if self._address is None else self._address[0]
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"

    async def start(self) -> None:
        """Binds and accepts. Raises a WeftError if the address is unavailable, or lacks the required protection."""
        if self._socket_path is None:
            context = server_context(self._exposure)
            listeners = await _listen(self._exposure, self._port_option)
            self._address = listeners[0].getsockname()[:2]
        else:
            context, listeners = None, [_listen_at(self._socket_path)]
        self._server = EdgeServer(
            EdgeServerConfig(
                self._app,
                limits=within_open_files(self._limits),
                on_refused=self._on_refused,
                interface="asgi3",
                ws="none",
                lifespan="off",
                log_config=None,
                # uvicorn's warnings concern callers' input, which is answered and logged here.
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
            ),
            context,
        )
        self._serving = start_critical(self._server.serve(sockets=listeners), name=f"{self._name}-http")
        started = asyncio.create_task(self._server.wait_started())
        await asyncio.wait((started, self._serving), return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            started.cancel()
            await self._serving
        if self._socket_path is None:
            log.info("listens", surface=self._name, url=self.url)

    def request_stop(self, grace_seconds: float) -> None:
        """Stops accepting requests; running ones have `grace_seconds`."""
        if self._server is not None:
            self._server.request_stop(grace_seconds)

    async def wait_stopped(self) -> None:
        """Returns when the server has stopped; immediately if it does not run."""
        if self._serving is not None:
            await self._serving
        if self._socket_path is not None:
            self._socket_path.unlink(missing_ok=True)
        self._server = self._serving = None


async def free_address(exposure: Exposure, port_option: str) -> tuple[str, int]:
    """Returns the resolved address of a listener that another program will open; port 0 stays 0.

    Raises as `AppServer.start` if it is unavailable, or lacks the required protection.
    """
    listeners = await _listen(exposure, port_option)
    host = str(listeners[0].getsockname()[0])
    for each in listeners:
        each.close()
    return host, exposure.port


async def _listen(exposure: Exposure, port_option: str) -> list[socket.socket]:
    """Returns a listener for each address of the host: callers of `localhost` use one of IPv4 or of IPv6.

    An address that this machine lacks, such as one of a switched-off IPv6, is left out if it has another one.
    """
    listeners: list[socket.socket] = []
    lacking: WeftError | None = None
    port = exposure.port
    for family, address in await _protected_addresses(exposure):
        try:
            listeners.append(_listener(family, (address, port), exposure.host, port_option))
        except OSError as error:
            lacking = invalid_field("host", f"cannot listen on port {port} on {exposure.host}: {error.strerror}")
            continue
        except WeftError:
            for each in listeners:
                each.close()
            raise
        # Port 0: any free port, the same for all.
        port = listeners[0].getsockname()[1]
    if not listeners and lacking is not None:
        raise lacking
    return listeners


def _listener(family: socket.AddressFamily, address: tuple[str, int], host: str, port_option: str) -> socket.socket:
    """Returns a listener. Raises OSError if this machine does not have the address, else a WeftError."""
    # With an explicit protocol, because asyncio disables Nagle's algorithm only for sockets that name TCP. With it, an
    # answer in two writes takes 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setblocking(False)
    try:
        listener.bind(address)
        # Listen now rather than when the server starts, to report a port in use here.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno in _ADDRESS_IS_LACKING:
            raise
        raise _bind_error(error, f"port {address[1]} on {host}", port_option) from None
    return listener


def _listen_at(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(_BACKLOG)
    return listener


async def _protected_addresses(exposure: Exposure) -> Sequence[tuple[socket.AddressFamily, str]]:
    """Resolves and checks the addresses, since spellings differ (127.1 and 0x7f000001 are loopback)."""
    host, port = exposure.host, exposure.port
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise invalid_field("host", f"'{host}' is not an address of this machine") from None
    addresses = list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))
    if not all(ipaddress.ip_address(address).is_loopback for _, address in addresses):
        exposure.require_protection()
    return addresses


_ADDRESS_IS_LACKING = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})


def _bind_error(error: OSError, where: str, port_option: str) -> WeftError:
    if error.errno == errno.EADDRINUSE:
        return WeftError(
            Reason.ALREADY_EXISTS, f"{where} is taken by another program; choose another with {port_option}"
        )
    if error.errno == errno.EACCES:
        return WeftError(
            Reason.PERMISSION_DENIED, f"{where} needs privileges; choose one above 1023 with {port_option}"
        )
    return invalid_field("host", f"cannot listen on {where}: {error.strerror}")
