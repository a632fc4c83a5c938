"""Searches by a SearXNG server, over its JSON API. The operator names its address, which may be private.

One connection per search, without redirects, proxies, cookies or compression.
"""

import asyncio
from typing import Any
from urllib.parse import urlencode

import aiohttp
import msgspec
from yarl import URL

from gateway.gateway_config import WebSearchConfig
from gateway.server_tools.tool import CallError, Page, ToolAnswer
from weft.kernel.channels.outbound import ForbiddenAddressError, Outbound

_CHUNK_BYTES = 64 * 1024
_MAX_FIELD_BYTES = 8 * 1024
_HEADERS = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "weft"}
_JSON_OFF = "it answered 403: add 'json' to search.formats in its settings.yml, and allow this host in its limiter"
_FORBIDDEN, _TOO_MANY = 403, 429


class SearXng:
    """A SearXNG server."""

    def __init__(self, config: WebSearchConfig, outbound: Outbound | None = None) -> None:
        """`outbound`: the addresses that it may have."""
        self._url = URL(config.url)
        self._config = config
        self._outbound = outbound or Outbound()
        self.host = self._url.authority.rpartition("@")[2]

    async def search(self, query: str) -> ToolAnswer:
        """See `Provider.search`."""
        # Only text: a caller cannot add parameters.
        target = f"{str(self._url).rstrip('/')}/search?{urlencode({'q': query, 'format': 'json'})}"
        sent, data = 0, b""
        try:
            async with asyncio.timeout(self._config.timeout_seconds):
                await asyncio.to_thread(self._outbound.resolve, self._url.raw_host or "", self._url.port or 0)
                sent = len(target)
                status, data = await self._get(target)
        except ForbiddenAddressError as refused:
            return _failed(f"its address {refused}", 0, 0)
        except TimeoutError:
            return _failed(f"it did not answer within {self._config.timeout_seconds:g} s", sent, 0)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # The message of the client has the address and the query.
            return _failed(f"it could not be reached: {type(error).__name__}", sent, len(data))
        if status != 200:
            why = _JSON_OFF if status == _FORBIDDEN else f"it answered {status}"
            code = CallError.TOO_MANY_REQUESTS if status == _TOO_MANY else CallError.UNAVAILABLE
            return _failed(why, sent, len(data), code)
        if len(data) > self._config.max_answer_bytes:
            return _failed(f"its answer has more than {self._config.max_answer_bytes} bytes", sent, len(data))
        return read(data, sent)

    async def _get(self, target: str) -> tuple[int, bytes]:
        """Returns the status, and one byte more than the permitted ones at most."""
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(socket_factory=self._outbound.open_socket, force_close=True),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                auto_decompress=False,
                max_field_size=_MAX_FIELD_BYTES,
            ) as session,
            session.get(URL(target, encoded=True), headers=_HEADERS, allow_redirects=False) as response,
        ):
            pieces, size = [], 0
            async for piece in response.content.iter_chunked(_CHUNK_BYTES):
                pieces.append(piece)
                size += len(piece)
                if size > self._config.max_answer_bytes:
                    break
            return response.status, b"".join(pieces)


def read(data: bytes, sent: int) -> ToolAnswer:
    """Returns the pages of an answer in SearXNG's format; whatever else it has is left out."""
    try:
        answer = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return _failed("its answer is not JSON", sent, len(data))
    results = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(results, list):
        return _failed("its answer has no results", sent, len(data))
    pages = tuple(_page(each) for each in results if isinstance(each, dict) and isinstance(each.get("url"), str))
    silent = answer.get("unresponsive_engines")
    if not pages and silent:
        return _failed(f"{len(silent)} of its engines did not answer, and no other found anything", sent, len(data))
    return ToolAnswer(pages=pages, sent_bytes=sent, received_bytes=len(data))


def _page(result: dict[str, Any]) -> Page:
    def text(name: str) -> str:
        value = result.get(name)
        return value if isinstance(value, str) else ""

    return Page(url=result["url"], title=text("title"), text=text("content"), age=text("publishedDate"))


def _failed(why: str, sent: int, received: int, error: CallError = CallError.UNAVAILABLE) -> ToolAnswer:
    return ToolAnswer(error=error, why=why, sent_bytes=sent, received_bytes=received)
