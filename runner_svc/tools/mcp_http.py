"""An HTTP client for MCP servers that never holds more of an answer than it may."""

from collections.abc import AsyncIterator

import httpx2

from runner_svc.tools.config import McpHttp

CONNECT_SECONDS = 5.0
WRITE_SECONDS = 10.0


def bounded_client(config: McpHttp, max_message_bytes: int) -> httpx2.AsyncClient:
    """A client with the configured headers. It asks for no compression, and takes none: a small body could grow large.

    Reading has no limit of time: a call's own timeout ends it. Proxies of the environment are not used, and redirects
    are left to the SDK, which stays with the origin.
    """
    timeout = httpx2.Timeout(None, connect=CONNECT_SECONDS, write=WRITE_SECONDS, pool=CONNECT_SECONDS)
    headers = {"Accept-Encoding": "identity", **config.headers}
    return httpx2.AsyncClient(
        headers=headers, timeout=timeout, transport=_BoundedTransport(max_message_bytes), trust_env=False
    )


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    """Ends an answer that is larger than allowed. Event streams have a bound of their own, one per event."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(trust_env=False)
        self._max_bytes = max_bytes

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise httpx2.DecodingError("the server compressed its answer, which it was not asked to", request=request)
        if response.headers.get("content-type", "").lower().startswith("text/event-stream"):
            return response
        assert isinstance(response.stream, httpx2.AsyncByteStream), "an asynchronous transport"
        response.stream = _BoundedStream(response.stream, self._max_bytes)
        return response


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        seen = 0
        async for chunk in self._stream:
            seen += len(chunk)
            if seen > self._max_bytes:
                raise httpx2.ReadError(f"the server sent a message of more than {self._max_bytes} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
