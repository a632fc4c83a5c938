"""MCP servers as tool sources. One task per server keeps it connected while the runner runs."""

import asyncio
import importlib
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from random import SystemRandom
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from runner_svc.policy.backoff import RedialLimits, RedialPolicy
from runner_svc.tools.port import MAX_TOOLS_PER_SOURCE, ToolDescription, ToolOutcome, ToolRunner, ToolSettings
from runner_svc.tools.schemas import object_schema
from runner_svc.waiting import end_tasks
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft.kernel.values.names import MAX_NAME_CHARS, is_name

if TYPE_CHECKING:
    from runner_svc.tools.mcp_connection import McpConnection

log = get_logger("weft.tools")

START_SECONDS = 10.0
"""Maximum wait for a server at the start of the runner."""
CONNECT_SECONDS = 60.0
"""Timeout of a connection attempt: a server may have to be downloaded first."""
LIST_SECONDS = 10.0
"""Timeout of listing the tools again."""
LIST_PAUSE_SECONDS = 1.0
"""Minimum interval between such lists, because a server may report changes continuously."""
CHECK_SECONDS = 5.0
"""Timeout of the ping after a cancelled call."""
STOP_SECONDS = 10.0
"""Maximum time for disconnecting; the transport's grace periods add up to less."""
MAX_DESCRIPTION_CHARACTERS = 4096
EAGER_FAILURES = 2
"""Failed attempts, one per handshake variant, after which a server counts as down."""
_UNREACHABLE = ("ConnectError", "ConnectTimeout")
"""Names of HTTP client exceptions; the client is only imported if such a server is configured."""
REDIAL = RedialLimits(first_seconds=0.5, max_seconds=30.0, min_seconds=0.05, success_seconds=10.0)


def untracked_tag() -> str:
    """Returns a tag for processes that later incarnations of a runner do not look for."""
    return f"-:{secrets.token_hex(8)}"


class McpServer(ToolRunner):
    """An MCP server as a ToolRunner.

    The SDK's task groups must be entered and left in one task: `_keep_connected`. Calls may come from any task.
    """

    def __init__(self, settings: ToolSettings, make_tag: Callable[[], str] = untracked_tag) -> None:
        """`make_tag` returns the tag by which a server's processes are found, also by the next incarnation."""
        self.settings = settings
        self._make_tag = make_tag
        self._random = SystemRandom()
        self._redial = RedialPolicy(time.monotonic(), REDIAL)
        self._tools: dict[str, ToolDescription] = {}
        self._left_out: dict[str, str] = {}
        self._connection: McpConnection | None = None
        self._problem = "its server has not been started"
        self._is_modern = False
        self._is_lost = self._is_stale = self._is_wanted = self._is_doubted = False
        self._stopping = asyncio.Event()
        self._nudge = asyncio.Event()
        self._settled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts connecting. Waits at most START_SECONDS for the server; attempts continue in the background."""
        if self._task is None:
            self._problem = "its server is being started"
            self._task = asyncio.create_task(self._keep_connected(), name=f"tools {self.settings.name}")
        await self._wait_settled(START_SECONDS)

    @override
    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is None:
            return
        self._stopping.set()
        self._nudge.set()
        if self._connection is not None:
            await asyncio.wait([task], timeout=STOP_SECONDS)
        task.cancel()
        await asyncio.wait([task], timeout=STOP_SECONDS)

    @override
    def why_missing(self, name: str) -> str:
        if self._connection is None:
            return self._problem
        tool = name.removeprefix(f"{self.settings.name}.")
        return self._left_out.get(tool, f"its server has no tool {tool}")

    def descriptions(self) -> Sequence[ToolDescription]:
        """Returns the server's tools; empty while it is down."""
        return () if self._connection is None else tuple(self._tools.values())

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Calls a tool. Immediately reconnects to a server that is down. Raises TOOL_UNAVAILABLE."""
        if self._connection is None:
            self._want()
            await self._wait_settled(CONNECT_SECONDS)
        connection = self._connection
        if connection is None or name not in self._tools:
            raise WeftError(Reason.TOOL_UNAVAILABLE, f"{name} cannot be used: {self.why_missing(name)}")
        try:
            return await connection.call(name.removeprefix(f"{self.settings.name}."), arguments)
        except asyncio.CancelledError:
            self._is_doubted = True
            self._nudge.set()
            raise
        except ConnectionError as error:
            why = self._problem if self._is_lost else "the connection to its server was lost"
            raise WeftError(Reason.TOOL_UNAVAILABLE, f"{name} returned no answer: {why}") from error

    def _want(self) -> None:
        self._settled.clear()
        self._is_wanted = True
        self._nudge.set()

    async def _wait_settled(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._settled.wait()
        except TimeoutError:
            return

    async def _keep_connected(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            was_ready = await self._connect_once()
            if self._stopping.is_set():
                return
            failures = 0 if was_ready else failures + 1
            if not was_ready:
                self._is_modern = not self._is_modern
            if failures >= EAGER_FAILURES:
                self._settled.set()
            now = time.monotonic()
            self._redial.ended(now - began if was_ready else 0.0, now)
            await self._pause(self._redial.failed(self._random.random(), now))

    async def _connect_once(self) -> bool:
        """Connects and serves until the connection is lost or stopped. Returns whether it connected."""
        was_ready = self._is_lost = self._is_stale = self._is_doubted = False
        try:
            async with asyncio.timeout(CONNECT_SECONDS) as limit:
                module = await asyncio.to_thread(importlib.import_module, "runner_svc.tools.mcp_connection")
                async with module.open_connection(
                    self.settings,
                    tag=self._make_tag(),
                    modern=self._is_modern,
                    note_lost=self._note_lost,
                    note_change=self._note_change,
                ) as connection:
                    await self._list(connection)
                    limit.reschedule(None)
                    was_ready = True
                    self._connection = connection
                    self._settled.set()
                    log.info("tool server connected", source=self.settings.name, tools=len(self._tools))
                    await self._attend(connection)
        except Exception as error:  # noqa: BLE001 - a server may fail in any way, and is retried
            self._note_failure(error)
        finally:
            self._connection = None
        return was_ready

    async def _attend(self, connection: "McpConnection") -> None:
        """Lists changed tools and pings until the connection is lost or stopped."""
        next_list = time.monotonic()
        while not (self._stopping.is_set() or self._is_lost):
            with suppress(TimeoutError):
                async with asyncio.timeout(next_list - time.monotonic() if self._is_stale else None):
                    await self._nudge.wait()
            self._nudge.clear()
            try:
                if self._is_stale and time.monotonic() >= next_list:
                    self._is_stale = False
                    await self._ask(LIST_SECONDS, self._list(connection))
                    next_list = time.monotonic() + LIST_PAUSE_SECONDS
                if self._is_doubted:
                    self._is_doubted = False
                    await self._ask(CHECK_SECONDS, connection.ping())
            except TimeoutError:
                self._note_lost("its server no longer responds")

    async def _ask(self, seconds: float, question: Coroutine[Any, Any, None]) -> None:
        """Awaits an answer or the stop. Raises TimeoutError if neither happens in time."""
        asking = asyncio.create_task(question)
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            done, _ = await asyncio.wait([asking, stopping], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise TimeoutError
            if asking in done:
                asking.result()
        finally:
            await end_tasks(asking, stopping)

    async def _pause(self, seconds: float) -> None:
        """Waits before the next attempt; a call or a stop ends the wait early."""
        self._nudge.clear()
        if not (self._is_wanted or self._stopping.is_set()):
            try:
                async with asyncio.timeout(seconds):
                    await self._nudge.wait()
            except TimeoutError:
                pass
        self._is_wanted = False

    async def _list(self, connection: "McpConnection") -> None:
        tools: dict[str, ToolDescription] = {}
        left_out: dict[str, str] = {}
        unfit = 0
        async for tool in connection.tools():
            name = f"{self.settings.name}.{tool.name}"
            if self.settings.allow and tool.name not in self.settings.allow:
                left_out[tool.name[:MAX_NAME_CHARS]] = "the configuration does not allow it"
                continue
            try:
                schema = _fit(name, tool.input_schema, len(tools))
            except ValueError as error:
                left_out[tool.name[:MAX_NAME_CHARS]] = str(error)
                unfit += 1
                continue
            text = tool.description or tool.title or ""
            tools[name] = ToolDescription(name=name, description=text[:MAX_DESCRIPTION_CHARACTERS], parameters=schema)
        self._tools, self._left_out = tools, left_out
        if unfit:
            log.warning("tools of a server cannot be used", source=self.settings.name, count=unfit)

    def _note_lost(self, why: str) -> None:
        if not (self._is_lost or self._stopping.is_set()):
            self._is_lost = True
            self._problem = f"{why}; retrying"
            # A call must neither use this connection nor mistake the end of this attempt for that of the next one.
            self._connection = None
            self._settled.clear()
            log.warning("tool server lost", source=self.settings.name, why=why)
        self._nudge.set()

    def _note_change(self) -> None:
        self._is_stale = True
        self._nudge.set()

    def _note_failure(self, error: Exception) -> None:
        """Records the cause of a failure without addresses, unless the end of the process was already reported."""
        if self._is_lost:
            return
        problem = f"{_cause(error)}; retrying"
        if problem != self._problem:
            log.warning("tool server not connected", source=self.settings.name, why=problem)
        self._problem = problem


def _fit(name: str, schema: Mapping[str, Any], have: int) -> dict[str, Any]:
    """Returns a tool's schema if it can be offered. Raises ValueError with the obstacle."""
    if have >= MAX_TOOLS_PER_SOURCE:
        raise ValueError(f"its server has more than {MAX_TOOLS_PER_SOURCE} tools; list it in `allow`")
    if not is_name(name):
        raise ValueError("its name is too long or has invalid characters")
    return object_schema(schema)


def _cause(error: BaseException) -> str:
    """Describes a failure without contents of URLs and answers."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, WeftError):
        return error.message
    if isinstance(error, TimeoutError):
        return "its server did not answer in time"
    if type(error).__name__ in _UNREACHABLE:
        return "its server cannot be reached"
    return f"its server cannot be used ({type(error).__name__})"
