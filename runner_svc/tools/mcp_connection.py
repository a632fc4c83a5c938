"""A connection to an MCP server through the official SDK. Imported only where an MCP server is configured."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import httpx2
import mcp_types as types
from mcp.client import Client
from mcp.client.session import IncomingMessage
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import SubscriptionLost
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from runner_svc.tools.config import McpCommand, McpHttp
from runner_svc.tools.mcp_stdio import server_process
from runner_svc.tools.port import ToolOutcome

MAX_PAGES = 64
"""Maximum number of pages of a tool list."""
MAX_LISTED_TOOLS = 4096
"""Maximum number of listed tools that are read; fewer are used."""
MIN_MESSAGE_BYTES = 4 * 1024 * 1024
"""Message size that every server may use, for example for 256 tools with large schemas."""
CLOSED_MESSAGE = "Connection closed"
"""Message of the SDK for a call whose connection has ended."""
LISTEN_AGAIN_SECONDS = 30.0
"""Pause before subscribing again after a server ended the subscription; the tools are listed again then."""
_ADDRESS = re.compile(r"https?://\S+", re.IGNORECASE)
_CLIENT_INFO = types.Implementation(name="weft", version="1")


class McpConnection:
    """A session with a server. `note_lost` and `note_change` can be called at any time while it is open."""

    def __init__(self, client: Client, *, is_process: bool, note_lost: Callable[[str], None]) -> None:
        self._client = client
        self._is_process = is_process
        self._note_lost = note_lost

    async def tools(self) -> AsyncGenerator[types.Tool]:
        """Yields the server's tools, page by page, at most MAX_LISTED_TOOLS. Raises MCPError."""
        listed, cursor = 0, None
        for _ in range(MAX_PAGES):
            page = await self._client.session.list_tools(params=types.PaginatedRequestParams(cursor=cursor))
            for tool in page.tools[: MAX_LISTED_TOOLS - listed]:
                yield tool
            listed += len(page.tools)
            cursor = page.next_cursor
            if cursor is None or listed >= MAX_LISTED_TOOLS:
                return

    async def ping(self) -> None:
        """Return once the server sends any answer; the caller sets the timeout."""
        with suppress(MCPError):  # servers without a handshake know no ping, and say so
            await self._client.session.send_request(types.PingRequest(), types.EmptyResult)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Call a tool by the server's own name for it. Raises ConnectionError when there will be no answer.

        Does not use the SDK's `call_tool`: that validates results by schemas of the server, whose regular expressions
        could block the runner.
        """
        request = types.CallToolRequest(params=types.CallToolRequestParams(name=tool, arguments=dict(arguments)))
        try:
            result = await self._client.session.send_request(request, types.CallToolResult)
        except MCPError as error:
            self._look_at(error)
            # The SDK's own errors, such as of a redirect, name addresses.
            message = _ADDRESS.sub("[an address]", error.message)
            return ToolOutcome(content=f"The tool's server gave an error: {message}", failed=True)
        except ValueError:  # pydantic's; its text would repeat the answer
            return ToolOutcome(content="The tool's server gave an answer that cannot be understood.", failed=True)
        return ToolOutcome(content=_text_of(result), failed=bool(result.is_error))

    def _look_at(self, error: MCPError) -> None:
        """Report a lost session if the error means that. Raises ConnectionError if the connection has ended.

        The end of a process is detected elsewhere. A restarted HTTP server does not know the session and answers with
        various codes; opening another session is cheap.
        """
        if not self._is_process and error.code not in (types.INVALID_PARAMS, types.METHOD_NOT_FOUND):
            self._note_lost("its server has ended the session")
        # The code alone is not enough: servers use it for errors of all kinds.
        if error.code == types.CONNECTION_CLOSED and error.message == CLOSED_MESSAGE:
            raise ConnectionError("the session has ended") from error


@asynccontextmanager
async def open_connection(
    config: McpCommand | McpHttp,
    *,
    tag: str,
    modern: bool,
    note_lost: Callable[[str], None],
    note_change: Callable[[], None],
) -> AsyncGenerator[McpConnection]:
    """Connect, perform the handshake, and disconnect at the end. Must be entered and left in one task.

    `tag` marks the process of a started server. `modern` tries the protocol without a handshake (2026) first; a server
    that knows neither may not answer for 10 s. Raises WeftError, MCPError, OSError or the HTTP client's errors, also in
    an ExceptionGroup.
    """
    _quieten_libraries()

    async def hear(message: IncomingMessage) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            note_change()

    async with AsyncExitStack() as stack:
        transport = await _transport(config, tag, note_lost, stack)
        mode = "auto" if modern else "legacy"
        client = await stack.enter_async_context(
            Client(transport, mode=mode, message_handler=hear, cache=None, client_info=_CLIENT_INFO)
        )
        if client.protocol_version in MODERN_PROTOCOL_VERSIONS:
            await stack.enter_async_context(_listening(client, note_change))
        yield McpConnection(client, is_process=isinstance(config, McpCommand), note_lost=note_lost)


async def _transport(
    config: McpCommand | McpHttp, tag: str, note_lost: Callable[[str], None], stack: AsyncExitStack
) -> AbstractAsyncContextManager[Any]:
    most = max(MIN_MESSAGE_BYTES, 2 * config.limits.max_output_bytes)
    if isinstance(config, McpCommand):
        return server_process(config, tag, most, note_lost)
    http = await stack.enter_async_context(bounded_client(config, most))
    return streamable_http_client(config.url, http_client=http, max_sse_event_size=most)


@asynccontextmanager
async def _listening(client: Client, note_change: Callable[[], None]) -> AsyncGenerator[None]:
    """Subscribe to changes: servers without a handshake report them to subscribers only."""
    task = asyncio.create_task(_listen(client, note_change), name="mcp listen")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _listen(client: Client, note_change: Callable[[], None]) -> None:
    while True:
        with suppress(SubscriptionLost, MCPError, TimeoutError):
            async with client.listen(tools_list_changed=True) as events:
                async for _ in events:
                    note_change()
        await asyncio.sleep(LISTEN_AGAIN_SECONDS)
        note_change()


def _text_of(result: types.CallToolResult) -> str:
    """Returns a result as text for a model, with other content named in brackets."""
    parts = [_described(block) for block in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _described(block: types.ContentBlock) -> str:
    match block:
        case types.TextContent():
            return block.text
        case types.ImageContent():
            return f"[an image, {block.mime_type}, that cannot be shown here]"
        case types.AudioContent():
            return f"[a sound, {block.mime_type}, that cannot be played here]"
        case types.ResourceLink():
            return f"[a resource: {block.name}, {block.uri}]"
        case types.EmbeddedResource():
            inner = block.resource
            if isinstance(inner, types.TextResourceContents):
                return inner.text
            return f"[a resource, {inner.mime_type or 'of an unknown type'}, that cannot be shown here]"


def _quieten_libraries() -> None:
    """Keep the SDK's logs, which hold content of servers and models, out of the runner's standard error."""
    for name in ("mcp", "client", "httpx2", "httpcore2"):
        logger = logging.getLogger(name)
        logger.propagate = False
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())


CONNECT_SECONDS = 5.0
WRITE_SECONDS = 10.0


def bounded_client(config: McpHttp, max_message_bytes: int) -> httpx2.AsyncClient:
    """Builds a client with the configured headers. It refuses compression: a small body could expand without a limit.

    Reading has no timeout: the call's own ends it. Proxies of the environment are not used, and redirects are left to
    the SDK, which stays with the origin.
    """
    timeout = httpx2.Timeout(None, connect=CONNECT_SECONDS, write=WRITE_SECONDS, pool=CONNECT_SECONDS)
    headers = {"Accept-Encoding": "identity", **config.headers}
    return httpx2.AsyncClient(
        headers=headers, timeout=timeout, transport=_BoundedTransport(max_message_bytes), trust_env=False
    )


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    """A transport that ends a response over the size limit. Event streams have their own limit, per event."""

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
