"""The tool `web_fetch`: one page by its URL, fetched by the gateway from public addresses only.

A model could put what it knows into a URL, so only those are fetched that its caller or an earlier result named.
Redirects are followed here: each hop has its host, domain and addresses checked as the first. There are no cookies,
credentials, proxies and compression.
"""

import asyncio
import codecs
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urljoin, urlsplit

import aiohttp
from typing_extensions import override
from yarl import URL

from gateway.gateway_config import GatewayConfig, WebSearchConfig
from gateway.media.documents import document_text
from gateway.media.fetcher import Network, public_session
from gateway.server_tools.pages import MAX_URL_CHARS, canonical_url, is_wanted
from gateway.server_tools.tool import (
    CallError,
    CallOptions,
    Page,
    ServerTool,
    ServerToolKind,
    ToolAnswer,
    ToolCalls,
)
from weft.kernel.channels.outbound import ForbiddenAddressError
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.time.clock import SystemClock

_CHUNK_BYTES = 64 * 1024
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_TOO_MANY = 429
_HTML = frozenset({"text/html", "application/xhtml+xml"})
_PDF = "application/pdf"
_CHARSET = re.compile(r"utf-(?:8|16|32)\S*|ascii|iso8859-\d+|cp\d+|gb\w+|big5\w*|shift_jis\w*|euc_\w+|koi8-\w")
_TEXTS = frozenset({"application/json", "application/xml", "application/yaml", "application/javascript"})
_HEADERS = {
    "Accept": "text/html, text/plain, text/markdown, application/json, application/pdf;q=0.8, */*;q=0.1",
    "Accept-Encoding": "identity",
    "User-Agent": "weft",
}


class FetchFailedError(Exception):
    """A page that is not read."""

    def __init__(self, code: CallError, why: str) -> None:
        """`why`: for the log, without the URL."""
        super().__init__(why)
        self.code = code


@dataclass(slots=True)
class _Traffic:
    """Bytes of one call, also if it fails."""

    sent: int = 0
    received: int = 0


class WebFetch(ServerTool):
    """Fetches pages, PDFs and texts."""

    description: ClassVar[str] = (
        "Reads a page of the web, a PDF or a text by its URL. Only complete URLs that the user wrote, or that an "
        "earlier result names, can be read."
    )
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"url": {"type": "string", "description": "The URL, exactly as it was given."}},
        "required": ["url"],
    }

    def __init__(self, config: WebSearchConfig, network: Network | None = None) -> None:
        """`network`: name resolution and sockets; the checks are outside of it."""
        self._config = config
        self._network = network or Network()
        self._turns = asyncio.Semaphore(config.max_concurrent_fetches)
        self._clock = SystemClock()
        self.host = ""
        self.max_uses = config.max_uses
        self.timeout_seconds = config.timeout_seconds
        self.max_text_bytes = config.max_page_bytes

    @override
    async def run(self, arguments: Mapping[str, Any], options: CallOptions) -> ToolAnswer:
        traffic, pages, code, why = _Traffic(), tuple[Page, ...](), None, ""
        try:
            url = _permitted(arguments.get("url"), options)
            async with asyncio.timeout(self.timeout_seconds), self._turns:
                pages = (await self._page(url, options, traffic),)
        except FetchFailedError as failed:
            code, why = failed.code, str(failed)
        except ForbiddenAddressError as refused:
            code, why = CallError.URL_NOT_ALLOWED, f"its address {refused}"
        except TimeoutError:
            code = CallError.URL_NOT_ACCESSIBLE if traffic.sent else CallError.TOO_MANY_REQUESTS
            why = f"it did not end within {self.timeout_seconds:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # The message of the client has the address.
            code, why = CallError.URL_NOT_ACCESSIBLE, f"its host could not be reached: {type(error).__name__}"
        except WeftError as error:
            code, why = CallError.UNAVAILABLE, error.message
        return ToolAnswer(pages=pages, error=code, why=why, sent_bytes=traffic.sent, received_bytes=traffic.received)

    async def _page(self, url: str, options: CallOptions, traffic: _Traffic) -> Page:
        """Returns the page at a URL, or where that redirects to. Raises FetchFailedError."""
        async with public_session(self._network, self.timeout_seconds) as session:
            for _ in range(self._config.max_redirects + 1):
                if not is_wanted(url, options):
                    raise FetchFailedError(CallError.URL_NOT_ALLOWED, "the request does not permit its domain")
                options.on_host(urlsplit(url).hostname or "")
                traffic.sent += len(url)
                async with session.get(URL(url, encoded=True), headers=_HEADERS, allow_redirects=False) as response:
                    if response.status not in _REDIRECTS:
                        return await self._read(url, response, traffic)
                    url = canonical_url(urljoin(url, response.headers.get("Location", "")))
                if not url:
                    raise FetchFailedError(CallError.URL_NOT_ALLOWED, "it redirects to no URL of the web")
        raise FetchFailedError(
            CallError.URL_NOT_ACCESSIBLE, f"it redirects more than {self._config.max_redirects} times"
        )

    async def _read(self, url: str, response: aiohttp.ClientResponse, traffic: _Traffic) -> Page:
        if response.status != 200:
            code = CallError.TOO_MANY_REQUESTS if response.status == _TOO_MANY else CallError.URL_NOT_ACCESSIBLE
            raise FetchFailedError(code, f"its host answered {response.status}")
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise FetchFailedError(CallError.URL_NOT_ACCESSIBLE, "its host sent it compressed")
        kind, charset = response.content_type, _known(response.charset)
        is_text = kind.startswith("text/") or kind in _TEXTS or kind.endswith(("+json", "+xml"))
        if "Content-Type" not in response.headers or not (is_text or kind == _PDF):
            raise FetchFailedError(CallError.UNSUPPORTED_CONTENT_TYPE, f"its type is {kind[:64]}")
        data, most = bytearray(), self._config.max_download_bytes
        async for piece in response.content.iter_chunked(_CHUNK_BYTES):
            data += piece
            traffic.received += len(piece)
            if len(data) > most:
                raise FetchFailedError(CallError.CONTENT_TOO_LARGE, f"it has more than {most} bytes")
        if kind in _HTML:
            found = await document_text(bytes(data), "page", url, charset)
        elif kind == _PDF:
            found = await document_text(bytes(data), "pdf")
        else:
            found = {"text": data.decode(charset or "utf-8", errors="replace")}
        if "error" in found:
            raise FetchFailedError(CallError.UNSUPPORTED_CONTENT_TYPE, f"it {found['error']}")
        now = self._clock.utc_now().strftime("%Y-%m-%dT%H:%M:%SZ")
        return Page(url=url, title=str(found.get("title", "")), text=str(found["text"]), retrieved_at=now)


def _permitted(given: object, options: CallOptions) -> str:
    """Returns the URL to fetch. Raises FetchFailedError."""
    if not isinstance(given, str) or not given.strip():
        raise FetchFailedError(CallError.INVALID_INPUT, "the model sent no URL")
    if len(given) > MAX_URL_CHARS:
        raise FetchFailedError(CallError.URL_TOO_LONG, f"the URL has {len(given)} characters")
    url = canonical_url(given)
    if not url:
        raise FetchFailedError(CallError.URL_NOT_ALLOWED, "the URL is none of a host of the web")
    if not options.appears(url):
        raise FetchFailedError(CallError.URL_NOT_IN_CONTEXT, "neither the caller nor a result named the URL")
    return url


def _known(charset: str | None) -> str:
    """Returns a character set of a header; empty for one that pages do not have, whose codec might be slow."""
    try:
        name = codecs.lookup(charset or "").name
    except LookupError:
        return ""
    return name if _CHARSET.fullmatch(name) else ""


def open_fetch(config: GatewayConfig, _calls: ToolCalls | None) -> ServerTool | None:
    """Returns the fetch of one gateway; None: it is off."""
    return WebFetch(config.web_search) if config.web_search.fetch else None


KIND = ServerToolKind(open=open_fetch)
