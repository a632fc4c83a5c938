"""An application on a port: it binds, serves and drains inside the host's event loop."""

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Callable

import structlog
from starlette.types import ASGIApp

from gateway.config import ConnectionLimits, Exposure
from gateway.http.connection_counts import within_open_files
from gateway.http.protocol import EdgeServerConfig
from gateway.http.server import EdgeServer
from gateway.http.tls import server_context
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft.kernel.service import start_critical

_BACKLOG = 2048

log = structlog.get_logger("weft.gateway")


class AppServer:
    """Life cycle: start, stop; both may be repeated."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        exposure: Exposure,
        limits: ConnectionLimits,
        on_refused: Callable[[int], None],
        name: str = "gateway",
        port_option: str = "--port",
    ) -> None:
        """`port_option` is what sets the port, for error messages.

        `on_refused` is told the status of what was refused before the application saw it.
        """
        self._app = app
        self._exposure = exposure
        self._limits = limits
        self._on_refused = on_refused
        self._name = name
        self._port_option = port_option
        self._server: EdgeServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._address: tuple[str, int] | None = None

    @property
    def port(self) -> int:
        """The port it listens on; the configured one before the start."""
        return self._exposure.port if self._address is None else self._address[1]

    @property
    def url(self) -> str:
        """Where it answers, such as `http://127.0.0.1:8080`."""
        scheme = "http" if self._exposure.tls is None else "https"
        host = self._exposure.host if self._address is None else self._address[0]
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"

    async def start(self) -> None:
        """Bind and accept. Raises a WeftError if the address cannot be had, or lacks the protection that it needs."""
        context = server_context(self._exposure)
        listener = await _listen(self._exposure, self._port_option)
        self._address = listener.getsockname()[:2]
        self._server = EdgeServer(
            EdgeServerConfig(
                self._app,
                limits=within_open_files(self._limits),
                on_refused=self._on_refused,
                interface="asgi3",
                ws="none",
                lifespan="off",
                log_config=None,
                # Its warnings are about what callers send, which is answered and logged here.
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
            ),
            None if context is None or self._exposure.tls is None else (context, self._exposure.tls),
        )
        self._serving = start_critical(self._server.serve(sockets=[listener]), name=f"{self._name}-http")
        started = asyncio.create_task(self._server.wait_started())
        await asyncio.wait((started, self._serving), return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            started.cancel()
            await self._serving
        log.info("listens", surface=self._name, url=self.url)

    def request_stop(self, grace_seconds: float) -> None:
        """Accept nothing more; running requests have `grace_seconds`."""
        if self._server is not None:
            self._server.request_stop(grace_seconds)

    async def wait_stopped(self) -> None:
        """Return when all is over; at once when it does not run."""
        if self._serving is not None:
            await self._serving
        self._server = self._serving = None


async def _listen(exposure: Exposure, port_option: str) -> socket.socket:
    host, port = exposure.host, exposure.port
    family, address = await _protected_address(exposure)
    # With its protocol named: asyncio turns Nagle's algorithm off for sockets that say they are TCP, and with it on an
    # answer in two writes takes 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setblocking(False)
    try:
        listener.bind(address)
        # Now rather than when the server starts: a port that is taken shows here at the latest.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_error(error, f"port {port} on {host}", port_option) from None
    return listener


async def _protected_address(exposure: Exposure) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """The resolved address: a spelling says nothing, 127.1 and 0x7f000001 are loopback, and a name may be anything."""
    host, port = exposure.host, exposure.port
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        raise invalid_field("host", f"'{host}' is not an address of this machine") from None
    family, _, _, _, address = found[0]
    if not ipaddress.ip_address(address[0]).is_loopback:
        exposure.require_protection()
    return family, (str(address[0]), port)


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
