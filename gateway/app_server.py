"""An application on a port of this machine: it binds, serves and drains inside the host's event loop."""

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Callable

import structlog
from starlette.types import ASGIApp

from gateway.config import ConnectionLimits
from gateway.protocol import EdgeServerConfig
from gateway.server import EdgeServer
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason

_BACKLOG = 2048

log = structlog.get_logger("weft.gateway")


class AppServer:
    """Life cycle: start, stop; both may be repeated."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        port: int,
        limits: ConnectionLimits,
        on_refused: Callable[[int], None],
        name: str = "gateway",
        port_option: str = "--port",
    ) -> None:
        """`port_option` is what sets the port, for error messages.

        `on_refused` is told the status of what was refused before the application saw it.
        """
        self._app = app
        self._host = host
        self._port = port
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
        return self._port if self._address is None else self._address[1]

    @property
    def url(self) -> str:
        """Where it answers, such as `http://127.0.0.1:8080`."""
        host = self._host if self._address is None else self._address[0]
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def start(self) -> None:
        """Bind and accept. Raises a WeftError if the address is not loopback or cannot be had."""
        listener = await _listen(self._host, self._port, self._port_option)
        self._address = listener.getsockname()[:2]
        self._server = EdgeServer(
            EdgeServerConfig(
                self._app,
                limits=self._limits,
                on_refused=self._on_refused,
                interface="asgi3",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name=f"{self._name}-http")
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


async def _listen(host: str, port: int, port_option: str) -> socket.socket:
    family, address = await _loopback_address(host, port)
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


async def _loopback_address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """The resolved address: a spelling says nothing, 127.1 and 0x7f000001 are loopback, and a name may be anything."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        raise invalid_field("host", f"'{host}' is not an address of this machine") from None
    family, _, _, _, address = found[0]
    if not ipaddress.ip_address(address[0]).is_loopback:
        raise invalid_field(
            "host",
            f"'{host}' is not a loopback address; the gateway has no keys and no TLS yet, so it listens on 127.0.0.1 "
            "only: put a proxy with both in front of it",
        )
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
