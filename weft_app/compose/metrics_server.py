"""The admin port of a service: only `GET /metrics` and probes, on a TCP address or a Unix socket."""

import asyncio
import errno
import re
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from aiohttp import web
from typing_extensions import override

from weft.client._home import is_served
from weft.kernel.access.principal import VIEW_TELEMETRY, authenticate
from weft.kernel.access.rpc_auth import presented_key
from weft.kernel.channels.tls import TlsFiles, TlsSource
from weft.kernel.errors.error_tree import WeftError, invalid_field, renaming_fields
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.health import HEALTH, LIVEZ, READYZ, HealthSource, probe_answer
from weft.kernel.services.service_lifecycle import Service
from weft.kernel.telemetry.log import get_logger
from weft.kernel.telemetry.metrics_page import MetricsPage
from weft.kernel.values.address import is_loopback
from weft_app.compose.security import KeyCheck, is_on_loopback

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
_HANDSHAKE_SECONDS = 10.0
_PATHS = ("/metrics", LIVEZ, READYZ, HEALTH)
_UNPROTECTED = (
    "beyond loopback, metrics need a certificate (gateway.tls or tls.certificate_file) and keys (auth.required: true), "
    "or metrics.insecure: true for plain HTTP without keys"
)
_PORT = re.compile(r":[0-9]*$")
_OF_NO_FOREIGN_PAGE = ("none", "same-origin")
"""Values of Sec-Fetch-Site of requests that no page of another origin makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsAccess:
    """Protection of a page at a TCP address."""

    tls: TlsFiles | None = None
    """None: no certificate is configured."""
    keys: KeyCheck | None = None
    """None: keys are not required."""
    is_insecure: bool = False
    """Whether the operator wants plain HTTP without keys."""


class MetricsServer(Service):
    """Serves a metrics page: to callers with a key if keys are required or beyond loopback, where it needs TLS too."""

    def __init__(
        self,
        page: MetricsPage,
        listen: str,
        health: HealthSource | None = None,
        access: MetricsAccess = MetricsAccess(),
    ) -> None:
        """`listen` is `host:port`, or `unix:` and a path. Raises INVALID_ARGUMENT for another form."""
        self._access = access
        self._is_loopback = self._has_tls = self._needs_key = False
        self._page = page
        self._health = health or HealthSource()
        self._path = Path(listen.removeprefix(UNIX_PREFIX)) if listen.startswith(UNIX_PREFIX) else None
        self._address = ("", 0) if self._path is not None else _host_and_port(listen)
        self._http: web.Server | None = None
        self._server: asyncio.Server | None = None
        self._scrapes = 0
        self._refusals = page.counter(
            "weft_admin_port_refusals",
            "Requests that the admin port refused, by HTTP status; none: a connection beyond the limit.",
            ("code",),
        )

    @property
    def url(self) -> str:
        """The URL of the page, or the path of its Unix socket."""
        if self._path is not None:
            return f"{UNIX_PREFIX}{self._path}"
        host, port = self._address
        scheme = "https" if self._has_tls else "http"
        return f"{scheme}://[{host}]:{port}/metrics" if ":" in host else f"{scheme}://{host}:{port}/metrics"

    @override
    async def start(self) -> None:
        """Starts listening. Raises ALREADY_EXISTS if the address is taken, INVALID_ARGUMENT if it cannot be used."""
        http = self._http = web.Server(
            self._answer, keepalive_timeout=KEEP_ALIVE_SECONDS, access_log=None, max_field_size=8190
        )

        def connected() -> asyncio.BaseProtocol:
            if len(http.connections) < MAX_CONNECTIONS:
                return http()
            self._refusals["none",].inc()
            return _Refusing()

        loop = asyncio.get_running_loop()
        access, context = self._access, None
        if self._path is None:
            with renaming_fields(lambda _: _FIELD):
                self._is_loopback = is_on_loopback(self._address[0])
            self._needs_key = not access.is_insecure and (access.keys is not None or not self._is_loopback)
            if not self._is_loopback and not access.is_insecure:
                context = self._context()
            self._has_tls = context is not None
        if self._path is not None and is_served(self._path):
            raise _taken(self.url)
        try:
            if self._path is not None:
                self._path.unlink(missing_ok=True)
                self._server = await loop.create_unix_server(connected, str(self._path), backlog=_BACKLOG)
                self._path.chmod(0o600)
            else:
                host, port = self._address
                self._server = await loop.create_server(
                    connected,
                    host,
                    port,
                    backlog=_BACKLOG,
                    ssl=context,
                    ssl_handshake_timeout=None if context is None else _HANDSHAKE_SECONDS,
                )
                self._address = host, self._server.sockets[0].getsockname()[1]
        except OSError as error:
            raise _bind_error(error, self.url) from None
        log.info("listens", surface="metrics", url=self.url)
        if self._is_unprotected:
            log.warning("metrics are refused", why=_UNPROTECTED)

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
        if (refusal := self._refusal(request)) is not None:
            self._refusals[str(refusal.status),].inc()
            return refusal
        if request.path != _PATHS[0]:
            is_healthy, document = probe_answer(request.path, self._health)
            return web.json_response(document, status=200 if is_healthy else 503)
        if self._scrapes >= MAX_SCRAPES:
            self._refusals["503",].inc()
            return web.Response(status=503, headers={"retry-after": "1"}, text="too many concurrent scrapes\n")
        self._scrapes += 1
        try:
            page = await self._page.render(", ".join(request.headers.getall("accept", [])))
        finally:
            self._scrapes -= 1
        response = web.Response(body=page.body, headers={"content-type": page.content_type})
        response.enable_compression()
        return response

    @property
    def _is_unprotected(self) -> bool:
        """Whether all callers are refused, because what would protect the page is missing."""
        return self._needs_key and (self._access.keys is None or not (self._has_tls or self._is_loopback))

    def _context(self) -> ssl.SSLContext | None:
        if self._access.tls is None:
            return None
        from gateway.http.tls import following_context  # noqa: PLC0415 - a runner has no gateway

        return following_context(TlsSource(self._access.tls))

    def _refusal(self, request: web.BaseRequest) -> web.Response | None:
        """Returns the answer to a caller who may not read a page; None: it may. Probes need no key."""
        host = _PORT.sub("", request.headers.get("host", "localhost").lower()).strip("[]")
        # On loopback a name of another site is DNS rebinding.
        is_foreign = self._is_loopback and not is_loopback(host)
        if is_foreign or request.headers.get("sec-fetch-site", "none") not in _OF_NO_FOREIGN_PAGE:
            return web.Response(status=403, text="pages of other origins may not read this\n")
        keys = self._access.keys
        if not self._needs_key or request.path != _PATHS[0]:
            return None
        if keys is None or self._is_unprotected:
            return web.Response(status=403, text=f"{_UNPROTECTED}\n")
        try:
            shown = presented_key({name.lower(): value for name, value in request.headers.items()})
            authenticate(keys.known_ring(), shown, datetime.now(UTC)).require(VIEW_TELEMETRY)
        except WeftError as error:
            challenge = {"www-authenticate": "Bearer"} if error.reason is Reason.UNAUTHENTICATED else {}
            return web.Response(status=error.traits.http_status, text=f"{error.message}\n", headers=challenge)
        return None


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
