"""A connection to an MCP server through the official SDK. Imported only if an MCP server is configured.

The second half is the transport of a server that is a child process: JSON lines over standard input and output. The
SDK's own transport does not limit lines and passes the server's standard error to the runner's. This one limits every
message, drains standard error into the debug log, and ends the server with the runner.
"""

import asyncio
import json
import logging
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx2
import mcp_types as types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client import Client
from mcp.client.session import IncomingMessage
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import SubscriptionLost
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCRequest, JSONRPCResponse, jsonrpc_message_adapter
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from runner_svc.supervise import parent_death
from runner_svc.supervise.leftovers import TAG_VARIABLE, kill_tagged
from runner_svc.supervise.logs import LogRing
from runner_svc.supervise.process import describe_exit
from runner_svc.supervise.system import this_system
from runner_svc.tools.port import ToolOutcome, ToolSettings
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger

log = get_logger("weft.tools")

MAX_PAGES = 64
"""Maximum number of pages of a tool list."""
MAX_LISTED_TOOLS = 4096
"""Maximum number of listed tools that are read; fewer are used."""
MIN_MESSAGE_BYTES = 4 * 1024 * 1024
"""Message size that every server may use, for example for 256 tools with large schemas."""
CLOSED_MESSAGE = "Connection closed"
"""The SDK's message for a call whose connection has ended."""
LISTEN_AGAIN_SECONDS = 30.0
"""Delay before subscribing again after a server ended the subscription; the tools are then listed again."""
CONNECT_SECONDS = 5.0
WRITE_SECONDS = 10.0
"""Maximum time that a server may leave a message unread."""
_ADDRESS = re.compile(r"https?://\S+", re.IGNORECASE)
_CLIENT_INFO = types.Implementation(name="weft", version="1")


class McpConnection:
    """A session with a server. `note_lost` and `note_change` may be called at any time while it is open."""

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
        """Waits for any answer of the server; the caller sets the timeout."""
        with suppress(MCPError):  # servers without a handshake answer that they do not support ping
            await self._client.session.send_request(types.PingRequest(), types.EmptyResult)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Calls a tool by the server's own name for it. Raises ConnectionError if there will be no answer.

        Does not use the SDK's `call_tool`, which validates results by the server's schemas: their regular expressions
        could block the runner.
        """
        request = types.CallToolRequest(params=types.CallToolRequestParams(name=tool, arguments=dict(arguments)))
        try:
            result = await self._client.session.send_request(request, types.CallToolResult)
        except MCPError as error:
            self._look_at(error)
            # The SDK's own errors, for example about a redirect, contain addresses.
            message = _ADDRESS.sub("[an address]", error.message)
            return ToolOutcome(content=f"The tool's server gave an error: {message}", failed=True)
        except ValueError:  # pydantic's; its text would repeat the answer
            return ToolOutcome(content="The tool's server gave an answer that cannot be understood.", failed=True)
        return ToolOutcome(content=_text_of(result), failed=bool(result.is_error))

    def _look_at(self, error: MCPError) -> None:
        """Reports a lost session if the error means that. Raises ConnectionError if the connection has ended.

        The end of a process is detected elsewhere. A restarted HTTP server does not know the session and answers with
        various codes; opening another session is cheap.
        """
        if not self._is_process and error.code not in (types.INVALID_PARAMS, types.METHOD_NOT_FOUND):
            self._note_lost("its server has ended the session")
        # The code is not enough: servers use it for all kinds of errors.
        if error.code == types.CONNECTION_CLOSED and error.message == CLOSED_MESSAGE:
            raise ConnectionError("the session has ended") from error


@asynccontextmanager
async def open_connection(
    settings: ToolSettings,
    *,
    tag: str,
    modern: bool,
    note_lost: Callable[[str], None],
    note_change: Callable[[], None],
) -> AsyncGenerator[McpConnection]:
    """Connects, performs the handshake, and disconnects at the end. Must be entered and left in one task.

    `tag` marks the process of a started server. `modern` tries the protocol without a handshake (2026) first; a server
    that supports neither may not answer for 10 s. Raises WeftError, MCPError, OSError or the HTTP client's errors,
    possibly in an ExceptionGroup.
    """
    _quieten_libraries()

    async def hear(message: IncomingMessage) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            note_change()

    async with AsyncExitStack() as stack:
        transport = await _transport(settings, tag, note_lost, stack)
        mode = "auto" if modern else "legacy"
        client = await stack.enter_async_context(
            Client(transport, mode=mode, message_handler=hear, cache=None, client_info=_CLIENT_INFO)
        )
        if client.protocol_version in MODERN_PROTOCOL_VERSIONS:
            await stack.enter_async_context(_listening(client, note_change))
        yield McpConnection(client, is_process=settings.type == "mcp_command", note_lost=note_lost)


async def _transport(
    settings: ToolSettings, tag: str, note_lost: Callable[[str], None], stack: AsyncExitStack
) -> AbstractAsyncContextManager[Any]:
    most = max(MIN_MESSAGE_BYTES, 2 * settings.max_output_bytes)
    if settings.type == "mcp_command":
        return server_process(settings, tag, most, note_lost)
    http = await stack.enter_async_context(bounded_client(settings, most))
    return streamable_http_client(settings.url or "", http_client=http, max_sse_event_size=most)


@asynccontextmanager
async def _listening(client: Client, note_change: Callable[[], None]) -> AsyncGenerator[None]:
    """Subscribes to changes, which servers without a handshake only report to subscribers."""
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
    """Returns a result as text for a model, with placeholders in brackets for other content."""
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
    """Keeps the SDK's logs, which contain content of servers and models, out of the runner's standard error."""
    for name in ("mcp", "client", "httpx2", "httpcore2"):
        logger = logging.getLogger(name)
        logger.propagate = False
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())


def bounded_client(settings: ToolSettings, max_message_bytes: int) -> httpx2.AsyncClient:
    """Returns a client with the configured headers. It refuses compression: a small body could expand without limit.

    Reading has no timeout, because the call has one. Proxies of the environment are not used, and redirects are left to
    the SDK, which stays within the origin.
    """
    timeout = httpx2.Timeout(None, connect=CONNECT_SECONDS, write=WRITE_SECONDS, pool=CONNECT_SECONDS)
    headers = {"Accept-Encoding": "identity", **settings.headers}
    return httpx2.AsyncClient(
        headers=headers, timeout=timeout, transport=_BoundedTransport(max_message_bytes), trust_env=False
    )


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    """A transport that aborts a response over the size limit. Event streams have a separate limit per event."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(trust_env=False)
        self._max_bytes = max_bytes

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise httpx2.DecodingError("the server compressed its answer, which was not requested", request=request)
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


EXIT_POLL_SECONDS = 0.5
"""Interval of checks for the process's end: a grandchild may hold the output open."""
CLOSE_SECONDS = 2.0
"""Grace period after its standard input was closed ..."""
TERM_SECONDS = 2.0
"""... and then after SIGTERM, before SIGKILL."""
KILL_SECONDS = 2.0
"""Maximum wait for the kernel after SIGKILL."""
MAX_UNANSWERED = 64
"""Maximum number of the server's own requests with unread answers: each is a task of the SDK."""
READ_BYTES = 64 * 1024
MAX_DEBUG_LINES = 200
"""Lines of a server's standard error that are written to the debug log; the rest is discarded."""
MAX_DEBUG_CHARACTERS = 1024
_TRAMPOLINE = str(Path(parent_death.__file__))

Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]


@dataclass(slots=True)
class _Pipes:
    """The runner's ends of the streams between the process and the SDK's session."""

    incoming: MemoryObjectSendStream[SessionMessage | Exception]
    outgoing: MemoryObjectReceiveStream[SessionMessage]
    note_lost: Callable[[str], None] = field(repr=False)
    is_lost: bool = False
    unanswered: int = 0
    """Number of the server's own requests whose answers are not written yet."""

    def lose(self, why: str) -> None:
        """Reports the loss once, and fails pending calls."""
        if not self.is_lost:
            self.is_lost = True
            self.note_lost(why)
        self.incoming.close()


@asynccontextmanager
async def server_process(
    settings: ToolSettings, tag: str, max_message_bytes: int, note_lost: Callable[[str], None]
) -> AsyncGenerator[Streams]:
    """Runs the server; when the block ends, it and all processes with its tag have ended.

    `tag` is set in its environment, which its descendants inherit. `note_lost` is called with the cause when the server
    is lost. Raises CONNECT_FAILED if the process cannot be started.
    """
    process = await _started(settings, tag, max_message_bytes)
    to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_server, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    pipes = _Pipes(to_session, from_session, note_lost)
    tasks = [
        asyncio.create_task(work, name=f"mcp {settings.name}")
        for work in (
            _read(process, pipes, max_message_bytes),
            _write(process, pipes),
            _watch(process, pipes),
            _drain_errors(process, settings.name),
        )
    ]
    try:
        yield from_server, to_server
    finally:
        # From here on, its end is not reported as a loss.
        immediately, pipes.is_lost = pipes.is_lost, True
        try:
            with anyio.CancelScope(shield=True):
                await _end(process, immediately=immediately)
                await asyncio.to_thread(kill_tagged, this_system(), tag)
        finally:
            for task in tasks:
                task.cancel()
            for stream in (to_session, from_server, to_server, from_session):
                stream.close()


async def _started(settings: ToolSettings, tag: str, max_message_bytes: int) -> asyncio.subprocess.Process:
    guarded = [sys.executable, "-I", "-S", _TRAMPOLINE, str(os.getpid()), *settings.argv]
    try:
        return await asyncio.create_subprocess_exec(
            *guarded,
            env={**settings.environment, TAG_VARIABLE: tag},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=max_message_bytes,
        )
    except (OSError, ValueError) as error:
        raise WeftError(Reason.CONNECT_FAILED, "its server cannot be started") from error


async def _read(process: asyncio.subprocess.Process, pipes: _Pipes, max_message_bytes: int) -> None:
    assert process.stdout is not None, "it is a pipe"
    try:
        while line := await process.stdout.readline():
            item = _parsed(line)
            if isinstance(item, SessionMessage) and isinstance(item.message, JSONRPCRequest):
                pipes.unanswered += 1
                if pipes.unanswered > MAX_UNANSWERED:
                    pipes.lose("its server sends requests without reading the answers")
                    return
            await pipes.incoming.send(item)
    except ValueError:
        pipes.lose(f"its server sent a message of more than {max_message_bytes} bytes")
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        return  # the session has ended
    else:
        await _lose_ended(process, pipes, "its server has closed its output")


async def _lose_ended(process: asyncio.subprocess.Process, pipes: _Pipes, why: str) -> None:
    """Reports a closed pipe with the exit code if the process has ended."""
    if await _exited(process, EXIT_POLL_SECONDS) and process.returncode is not None:
        why = f"its server has ended ({describe_exit(process.returncode)})"
    pipes.lose(why)


def _parsed(line: bytes) -> SessionMessage | Exception:
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError:
        # The error's text would repeat the server's content.
        return ValueError("the server sent a line that is not a JSON-RPC message")


async def _write(process: asyncio.subprocess.Process, pipes: _Pipes) -> None:
    assert process.stdin is not None, "it is a pipe"
    try:
        async for item in pipes.outgoing:
            text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(text.encode(errors="replace") + b"\n")
            async with asyncio.timeout(WRITE_SECONDS):
                await process.stdin.drain()
            if isinstance(item.message, JSONRPCResponse | JSONRPCError):
                pipes.unanswered -= 1
    except TimeoutError:
        pipes.lose(f"its server has read nothing for {WRITE_SECONDS:g} s")
    except OSError:
        await _lose_ended(process, pipes, "its server has closed its input")


async def _watch(process: asyncio.subprocess.Process, pipes: _Pipes) -> None:
    # Not process.wait(), which would also wait for the pipes to be closed.
    while process.returncode is None:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(EXIT_POLL_SECONDS)
    pipes.lose(f"its server has ended ({describe_exit(process.returncode)})")


async def _drain_errors(process: asyncio.subprocess.Process, name: str) -> None:
    assert process.stderr is not None, "it is a pipe"
    lines, left = LogRing(), MAX_DEBUG_LINES
    while chunk := await process.stderr.read(READ_BYTES):
        for line in lines.feed(chunk)[:left]:
            left -= 1
            log.debug("a tool server printed", source=name, line=line[:MAX_DEBUG_CHARACTERS])


async def _end(process: asyncio.subprocess.Process, *, immediately: bool) -> None:
    """Ends the server: closes its input, then TERM, then KILL to the group, which also ends remaining members.

    `immediately`: a failed server gets no time to notice that its input is closed.
    """
    assert process.stdin is not None, "it is a pipe"
    try:
        process.stdin.close()
        for signal_number, grace in (
            (None, 0.0 if immediately else CLOSE_SECONDS),
            (signal.SIGTERM, TERM_SECONDS),
            (signal.SIGKILL, KILL_SECONDS),
        ):
            if signal_number is not None and process.returncode is None:
                _signal_group(process.pid, signal_number)
            if await _exited(process, grace):
                break
    finally:
        _signal_group(process.pid, signal.SIGKILL)
        # Closed without waiting for EOF: a grandchild may hold the other ends indefinitely.
        transport = getattr(process, "_transport", None)
        if transport is not None:
            transport.close()


async def _exited(process: asyncio.subprocess.Process, seconds: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while process.returncode is None:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.01)
    return process.returncode is not None


def _signal_group(leader: int, signal_number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal_number)
