"""The admin port of a service: only `GET /metrics` and probes, on a TCP address or a Unix socket."""

import asyncio
import errno
from pathlib import Path

from aiohttp import web
from typing_extensions import override

from weft.client._home import is_served
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.health import HEALTH, LIVEZ, READYZ, HealthSource, probe_answer
from weft.kernel.log import get_logger
from weft.kernel.metrics import MetricsPage
from weft.kernel.reasons import Reason
from weft.kernel.service import Service

log = get_logger("weft.metrics")

MAX_CONNECTIONS = 16
"""Maximum number of connections; further ones are closed."""
KEEP_ALIVE_SECONDS = 75.0
"""Timeout of idle connections, longer than a usual scrape interval."""
MAX_SCRAPES = 2
"""Maximum number of concurrent scrapes; further ones are rejected with 503."""
UNIX_PREFIX = "unix:"
_FIELD = "metrics.listen"
_BACKLOG = 16
_PATHS = ("/metrics", LIVEZ, READYZ, HEALTH)


class MetricsServer(Service):
    """Serves a metrics page without keys, on loopback or at a configured address."""

    def __init__(self, page: MetricsPage, listen: str, health: HealthSource | None = None) -> None:
        """`listen` is `host:port`, or `unix:` and a path. Raises INVALID_ARGUMENT for another form."""
        self._page = page
        self._health = health or HealthSource()
        self._path = Path(listen.removeprefix(UNIX_PREFIX)) if listen.startswith(UNIX_PREFIX) else None
        self._address = ("", 0) if self._path is not None else _host_and_port(listen)
        self._http: web.Server | None = None
        self._server: asyncio.Server | None = None
        self._scrapes = 0

    @property
    def url(self) -> str:
        """The URL of the page, or the path of its Unix socket."""
        if self._path is not None:
            return f"{UNIX_PREFIX}{self._path}"
        host, port = self._address
        return f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"

    @override
    async def start(self) -> None:
        """Starts listening. Raises ALREADY_EXISTS if the address is taken, INVALID_ARGUMENT if it cannot be used."""
        http = self._http = web.Server(
            self._answer, keepalive_timeout=KEEP_ALIVE_SECONDS, access_log=None, max_field_size=8190
        )

        def connected() -> asyncio.BaseProtocol:
            return http() if len(http.connections) < MAX_CONNECTIONS else _Refusing()

        loop = asyncio.get_running_loop()
        if self._path is not None and is_served(self._path):
            raise _taken(self.url)
        try:
            if self._path is not None:
                self._path.unlink(missing_ok=True)
                self._server = await loop.create_unix_server(connected, str(self._path), backlog=_BACKLOG)
                self._path.chmod(0o600)
            else:
                host, port = self._address
                self._server = await loop.create_server(connected, host, port, backlog=_BACKLOG)
                self._address = host, self._server.sockets[0].getsockname()[1]
        except OSError as error:
            raise _bind_error(error, self.url) from None
        log.info("listens", surface="metrics", url=self.url)

    @override
    async def stop(self, grace_seconds: float) -> None:
        """Closes the port and its connections."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        if self._http is not None:
            await self._http.shutdown(min(grace_seconds, 1.0))
        await server.wait_closed()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path not in _PATHS:
            return web.Response(status=404, text=f"only {', '.join(_PATHS)} are here\n")
        if request.method not in {"GET", "HEAD"}:
            return web.Response(status=405, headers={"allow": "GET, HEAD"}, text="only GET and HEAD\n")
        if request.path != _PATHS[0]:
            is_healthy, document = probe_answer(request.path, self._health)
            return web.json_response(document, status=200 if is_healthy else 503)
        if self._scrapes >= MAX_SCRAPES:
            return web.Response(status=503, headers={"retry-after": "1"}, text="too many concurrent scrapes\n")
        self._scrapes += 1
        try:
            page = await self._page.render(", ".join(request.headers.getall("accept", [])))
        finally:
            self._scrapes -= 1
        response = web.Response(body=page.body, headers={"content-type": page.content_type})
        response.enable_compression()
        return response


class _Refusing(asyncio.Protocol):
    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _host_and_port(listen: str) -> tuple[str, int]:
    host, separator, port = listen.rpartition(":")
    if not separator or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise invalid_field(_FIELD, "must be an address and a port, such as 127.0.0.1:9464")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _bind_error(error: OSError, where: str) -> WeftError:
    if error.errno == errno.EADDRINUSE:
        return _taken(where)
    return invalid_field(_FIELD, f"cannot listen on {where}: {error.strerror or error}")


def _taken(where: str) -> WeftError:
    remedy = f"choose another with {_FIELD} (weft serve: --metrics)"
    return WeftError(Reason.ALREADY_EXISTS, f"{where} is taken by another program; {remedy}")
