"""The transport of an MCP server as a child process: JSON lines over its standard input and output.

The SDK's own transport does not limit a line and leaves the server's standard error on the runner's. This one limits
every message, drains standard error into the debug log, and ends the server with the runner.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCRequest, JSONRPCResponse, jsonrpc_message_adapter

from runner_svc.supervise import parent_death
from runner_svc.supervise.leftovers import TAG_VARIABLE, kill_tagged
from runner_svc.supervise.logs import LogRing
from runner_svc.supervise.process import describe_exit
from runner_svc.supervise.system import this_system
from runner_svc.tools.config import McpCommand
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

log = structlog.get_logger("weft.tools")

WRITE_SECONDS = 10.0
"""Maximum time that a server may leave a message unread."""
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
"""Lines of a server's standard error that go to the debug log; the rest is discarded."""
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
    """The server's own requests whose answers were not written yet."""

    def lose(self, why: str) -> None:
        """Report the loss once, and fail pending calls."""
        if not self.is_lost:
            self.is_lost = True
            self.note_lost(why)
        self.incoming.close()


@asynccontextmanager
async def server_process(
    config: McpCommand, tag: str, max_message_bytes: int, note_lost: Callable[[str], None]
) -> AsyncGenerator[Streams]:
    """Run the server; it and all processes with its tag have ended when the block ends.

    `tag` goes into its environment, and so into all its descendants'. `note_lost` is called with the cause when the
    server is lost. Raises CONNECT_FAILED when the process cannot be started.
    """
    process = await _started(config, tag, max_message_bytes)
    to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_server, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    pipes = _Pipes(to_session, from_session, note_lost)
    tasks = [
        asyncio.create_task(work, name=f"mcp {config.name}")
        for work in (
            _read(process, pipes, max_message_bytes),
            _write(process, pipes),
            _watch(process, pipes),
            _drain_errors(process, config.name),
        )
    ]
    try:
        yield from_server, to_server
    finally:
        # From here on its end is not reported as a loss.
        at_once, pipes.is_lost = pipes.is_lost, True
        try:
            with anyio.CancelScope(shield=True):
                await _end(process, at_once=at_once)
                await asyncio.to_thread(kill_tagged, this_system(), tag)
        finally:
            for task in tasks:
                task.cancel()
            for stream in (to_session, from_server, to_server, from_session):
                stream.close()


async def _started(config: McpCommand, tag: str, max_message_bytes: int) -> asyncio.subprocess.Process:
    guarded = [sys.executable, "-I", "-S", _TRAMPOLINE, str(os.getpid()), *config.argv]
    try:
        return await asyncio.create_subprocess_exec(
            *guarded,
            env={**config.environment, TAG_VARIABLE: tag},
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
                    pipes.lose("its server asks one thing after the other and reads no answers")
                    return
            await pipes.incoming.send(item)
    except ValueError:
        pipes.lose(f"its server sent a message of more than {max_message_bytes} bytes")
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        return  # the session has ended
    else:
        await _lose_ended(process, pipes, "its server has closed its output")


async def _lose_ended(process: asyncio.subprocess.Process, pipes: _Pipes, why: str) -> None:
    """Report a closed pipe by the exit code, if the process has ended."""
    if await _exited(process, EXIT_POLL_SECONDS) and process.returncode is not None:
        why = f"its server has ended ({describe_exit(process.returncode)})"
    pipes.lose(why)


def _parsed(line: bytes) -> SessionMessage | Exception:
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError:
        # The error's own text would repeat the server's content.
        return ValueError("the server sent a line that is no JSON-RPC message")


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


async def _end(process: asyncio.subprocess.Process, *, at_once: bool) -> None:
    """End the server: close its input, then TERM, then KILL the group, and what is left of it in any case.

    `at_once`: a failed server gets no time to notice that its input is closed.
    """
    assert process.stdin is not None, "it is a pipe"
    try:
        process.stdin.close()
        for signal_number, grace in (
            (None, 0.0 if at_once else CLOSE_SECONDS),
            (signal.SIGTERM, TERM_SECONDS),
            (signal.SIGKILL, KILL_SECONDS),
        ):
            if signal_number is not None and process.returncode is None:
                _signal_group(process.pid, signal_number)
            if await _exited(process, grace):
                break
    finally:
        _signal_group(process.pid, signal.SIGKILL)
        # Close these ends without waiting for EOF: a grandchild may hold the other ends without an end.
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
