"""The media fetcher: downloads URLs in requests, only from hosts that the operator allows.

A name is resolved once, and all its addresses must be public. The socket is opened here, after another check of the
address that it connects to. Redirects, proxies, cookies, credentials and compression are not used; the certificate must
match the name.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from typing_extensions import override
from yarl import URL

from gateway.gateway_config import MIN_BYTES_PER_SECOND, MediaConfig
from gateway.media.addresses import MediaUrl, require_allowed
from gateway.media.content import checked_image
from gateway.media.request_media import MediaAddress, MediaSource, too_large
from weft.api.common.v1 import chat_pb2
from weft.kernel.channels.outbound import AddressInfo, ForbiddenAddressError, Outbound
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import Clock, SystemClock

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from aiohttp.typedefs import LooseHeaders

SLOW_START_SECONDS = 5.0
"""Time after which MIN_BYTES_PER_SECOND is enforced."""
_PUBLIC = Outbound(is_public_only=True)
MAX_RESOLVED = 16
"""Maximum number of addresses of one name."""
_CHUNK_BYTES = 64 * 1024
_MAX_LINE_BYTES = 8 * 1024
_MAX_HEADERS = 64
_HEADERS: "LooseHeaders" = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "weft"}


async def look_up(host: str, port: int) -> list[AddressInfo]:
    """Returns the addresses of a name from the system's resolver. Raises OSError."""
    return list(await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM))


def open_socket(info: AddressInfo) -> socket.socket:
    """Returns an unconnected socket for this address."""
    return socket.socket(info[0], info[1], info[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Name resolution and sockets, which tests replace. The checks are outside of it."""

    look_up: Callable[[str, int], Awaitable[list[AddressInfo]]] = look_up
    open_socket: Callable[[AddressInfo], socket.socket] = open_socket
    tls: ssl.SSLContext = field(default_factory=ssl.create_default_context)

    def checked_socket(self, info: AddressInfo) -> socket.socket:
        """Returns a socket for a public address. Raises ForbiddenAddressError for another one."""
        _PUBLIC.require(str(info[4][0]), int(info[4][1]))
        return self.open_socket(info)


def public_session(network: Network, connect_seconds: float) -> aiohttp.ClientSession:
    """Returns an HTTP client that connects to public addresses only, once per request.

    Its requests raise ForbiddenAddressError, aiohttp.ClientError and OSError.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            resolver=_CheckingResolver(network),
            socket_factory=network.checked_socket,
            use_dns_cache=False,
            force_close=True,
            ssl=network.tls,
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=None, connect=connect_seconds),
        max_line_size=_MAX_LINE_BYTES,
        max_field_size=_MAX_LINE_BYTES,
        max_headers=_MAX_HEADERS,
        read_bufsize=_CHUNK_BYTES,
    )


class MediaFetcher(MediaSource):
    """Fetches media over HTTP, with a new connection for each file."""

    def __init__(self, config: MediaConfig, *, clock: Clock | None = None, network: Network | None = None) -> None:
        self._config = config
        self._clock = clock or SystemClock()
        self._network = network or Network()
        self._turns = asyncio.Semaphore(config.max_concurrent_fetches)

    @override
    async def fetch(self, addresses: Sequence[MediaAddress]) -> Mapping[str, chat_pb2.MediaPart]:
        # Sequential, to bound the total size and to leave slots to other requests. Required files come first.
        files: dict[str, chat_pb2.MediaPart] = {}
        left = self._config.max_total_bytes
        under_way = addresses[0] if addresses else None
        try:
            async with asyncio.timeout(self._config.total_timeout_seconds):
                for address in sorted(addresses, key=lambda each: each.optional):
                    under_way = address
                    try:
                        files[address.url] = await self._file(address, left)
                    except FieldError:
                        if not address.optional:
                            raise
                    else:
                        left -= len(files[address.url].data)
        except TimeoutError:
            assert under_way is not None
            if not under_way.optional:
                raise self._too_slow(under_way.field) from None
        return files

    async def _file(self, address: MediaAddress, left: int) -> chat_pb2.MediaPart:
        url = require_allowed(address.url, address.field, self._config)
        async with self._turn():
            try:
                data = await self._download(url, address.field, left)
            except ForbiddenAddressError:
                raise invalid_field(address.field, "has a host with an address that is not public") from None
            except (aiohttp.ClientError, OSError, ValueError) as error:
                raise invalid_field(address.field, f"could not be fetched: {_public_reason(error)}") from None
        return checked_image(data, address.field, self._config)

    @asynccontextmanager
    async def _turn(self) -> "AsyncGenerator[None]":
        try:
            async with asyncio.timeout(self._config.total_timeout_seconds / 2):
                await self._turns.acquire()
        except TimeoutError:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"too many files are being fetched (max_concurrent_fetches is {self._config.max_concurrent_fetches})",
                retry_after_seconds=1,
            ) from None
        try:
            yield
        finally:
            self._turns.release()

    async def _download(self, url: MediaUrl, field_name: str, left: int) -> bytes:
        config = self._config
        async with (
            public_session(self._network, config.connect_timeout_seconds) as session,
            session.get(_built(url), headers=_HEADERS, allow_redirects=False) as response,
        ):
            _require_plain(response, field_name)
            return await self._body(response, field_name, left)

    async def _body(self, response: aiohttp.ClientResponse, field_name: str, left: int) -> bytes:
        length = response.content_length
        if length is not None:
            self._require_fits(length, field_name, left)
        pieces: list[bytes] = []
        size, began = 0, self._clock.monotonic()
        async for piece in response.content.iter_any():
            size += len(piece)
            self._require_fits(size, field_name, left)
            pieces.append(piece)
            seconds = self._clock.monotonic() - began
            if seconds > SLOW_START_SECONDS and size < seconds * MIN_BYTES_PER_SECOND:
                raise self._too_slow(field_name)
        if length is not None and size != length:
            raise invalid_field(field_name, "could not be fetched: its host sent less than it announced")
        return b"".join(pieces)

    def _require_fits(self, size: int, field_name: str, left: int) -> None:
        if size > self._config.max_bytes:
            raise too_large(field_name, self._config.max_bytes)
        if size > left:
            raise FieldError(
                field_name,
                f"makes the files of this request larger than {self._config.max_total_bytes} bytes "
                "(gateway.media.max_total_bytes)",
                Reason.REQUEST_TOO_LARGE,
            )

    def _too_slow(self, field_name: str) -> FieldError:
        return invalid_field(
            field_name,
            f"could not be fetched within {self._config.total_timeout_seconds:g} seconds at "
            f"{MIN_BYTES_PER_SECOND} bytes per second (gateway.media)",
        )


class _CheckingResolver(AbstractResolver):
    """Resolves a name once; refuses it unless all addresses are public."""

    def __init__(self, network: Network) -> None:
        self._network = network

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Returns the addresses as text, so that they are not resolved again."""
        found: list[ResolveResult] = []
        for kind, _, protocol, _, where in (await self._network.look_up(host, port))[:MAX_RESOLVED]:
            if family not in {socket.AF_UNSPEC, kind}:
                continue
            address = str(where[0])
            _PUBLIC.require(address, port)
            result = ResolveResult(
                hostname=host, host=address, port=port, family=int(kind), proto=protocol, flags=socket.AI_NUMERICHOST
            )
            if result not in found:
                found.append(result)
        if not found:
            raise OSError("no address")
        return found

    async def close(self) -> None:
        """Does nothing: it holds no resources."""


def _built(url: MediaUrl) -> URL:
    """Builds the client's URL from checked parts, without parsing it again."""
    return URL(f"{url.scheme}://{url.host}:{url.port}{url.target}", encoded=True)


def _require_plain(response: aiohttp.ClientResponse, field_name: str) -> None:
    if 300 <= response.status < 400:
        raise invalid_field(field_name, "could not be fetched: it redirects elsewhere, which is not followed")
    if response.status != 200:
        raise invalid_field(field_name, f"could not be fetched: its host answered {response.status}")
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise invalid_field(field_name, "could not be fetched: its host sent it compressed")


def _public_reason(error: Exception) -> str:
    """Returns the reason of a failure, without details of the mesh's network or resolver."""
    match error:
        case aiohttp.ConnectionTimeoutError():
            return "its host was not reached in time"
        case aiohttp.ClientConnectorCertificateError():
            return "the certificate of its host is not valid"
        case aiohttp.ClientConnectorError() | aiohttp.ClientSSLError():
            return "its host was not reached"
        case aiohttp.ClientPayloadError():
            return "its host sent less than it announced"
        case _:
            return "its host did not answer as a web server does"
