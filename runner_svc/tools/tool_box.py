"""The tool box of a runner: tools by name, validation of calls, and their execution within limits."""

import asyncio
import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from runner_svc.tools.mcp_servers import McpServer, untracked_tag
from runner_svc.tools.port import (
    ToolDescription,
    ToolOutcome,
    ToolRunner,
    ToolSettings,
    bounded,
    described,
    failure,
)
from runner_svc.tools.python_functions import PythonFunction
from runner_svc.tools.schemas import ArgumentCheck
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.cancellation import task_is_cancelled

log = get_logger("weft.tools")

CANCEL_GRACE_SECONDS = 1.0
"""How long a cancelled call has to end before it is abandoned."""
MAX_ABANDONED_CALLS = 64
"""Maximum number of abandoned calls; beyond that no tool is run."""


class ToolBox:
    """The tools of all sources of a runner."""

    def __init__(self, sources: Sequence[ToolRunner] = (), only: Collection[str] | None = None) -> None:
        """`only`: the names that can be used; None: all."""
        self._sources = tuple(sources)
        self._only = only
        self._known: dict[str, ToolDescription] = {}
        self._checks: dict[str, ArgumentCheck] = {}
        self._abandoned: set[asyncio.Task[ToolOutcome]] = set()

    async def start(self) -> None:
        """Starts all sources concurrently. A source that is down keeps retrying and delays no other."""
        await asyncio.gather(*(source.start() for source in self._sources))

    async def stop(self) -> None:
        """Stops all sources, and cancels abandoned calls."""
        for task in self._abandoned:
            task.cancel()
        ends = await asyncio.gather(*(source.stop() for source in self._sources), return_exceptions=True)
        for source, end in zip(self._sources, ends, strict=True):
            if isinstance(end, Exception):
                log.warning("source of tools did not stop cleanly", source=source.settings.name, error=repr(end)[:512])

    def pick(self, names: Sequence[str], taken: Collection[str] = ()) -> tuple[ToolDescription, ...]:
        """Returns the tools with these names, without duplicates, with unique wire names that are not in `taken`.

        Raises TOOL_UNAVAILABLE with the tool and the cause: not configured, or its server is down.
        """
        picked = [self._find(name) for name in dict.fromkeys(names)]
        wires = wire_names((tool.name for tool in picked), taken)
        return tuple(dataclasses.replace(tool, wire_name=wires[tool.name]) for tool in picked)

    def names(self) -> tuple[str, ...]:
        """Returns the tools that can currently be picked, sorted by name."""
        return tuple(
            sorted(
                tool.name
                for source in self._sources
                for tool in source.descriptions()
                if self._source_of(tool.name) is source
            )
        )

    def is_remote(self, name: str) -> bool:
        """Whether calling this tool sends data to a remote provider."""
        source = self._source_of(name)
        return source is not None and source.settings.remote

    def check(self, name: str, arguments_text: str) -> dict[str, Any]:
        """Parses and validates the arguments of a call. An empty text means no arguments.

        Raises TOOL_CALL_INVALID if they are not JSON, not an object or do not match the tool's schema; TOOL_UNAVAILABLE
        for a tool that has never been picked and does not exist.
        """
        tool = self._known.get(name) or self._find(name)
        known = self._checks.get(name)
        if known is None or known.schema is not tool.parameters:
            known = self._checks[name] = ArgumentCheck(name, tool.parameters)
        return known.parse(arguments_text)

    async def run(self, name: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Calls a tool. Only raises CancelledError: timeouts, crashes and limits become outcomes."""
        source = self._source_of(name)
        if source is None:
            return failure(f"the tool {name} is not configured")
        if len(self._abandoned) >= MAX_ABANDONED_CALLS:
            return failure("too many earlier tool calls are still running; the tool was not run")
        outcome = await self._run_bounded(source, name, arguments)
        log.debug("tool called", tool=name, failed=outcome.failed, cut=outcome.cut)
        return outcome

    async def _run_bounded(self, source: ToolRunner, name: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        task = asyncio.create_task(_call(source, name, arguments), name=f"tool {name}")
        try:
            await asyncio.wait([task], timeout=source.settings.timeout_seconds)
        finally:
            ended = task.done() or await self._end(task)
        if not ended or task.cancelled():
            return failure(f"the tool did not answer within {source.settings.timeout_seconds:g} s")
        return task.result()

    async def _end(self, task: asyncio.Task[ToolOutcome]) -> bool:
        """Cancels a call that takes too long. Returns False if it continues: it is then abandoned."""
        task.cancel()
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)
        done, _ = await asyncio.wait([task], timeout=CANCEL_GRACE_SECONDS)
        return bool(done)

    def _find(self, name: str) -> ToolDescription:
        source = self._source_of(name)
        if source is None:
            raise _unavailable(name, "this runner does not have it")
        for tool in source.descriptions():
            if tool.name == name:
                self._known[name] = tool
                return tool
        raise _unavailable(name, source.why_missing(name))

    def _source_of(self, name: str) -> ToolRunner | None:
        """Returns the source of a tool, by the longest matching prefix of its name; None: no usable tool."""
        if self._only is not None and name not in self._only:
            return None
        fitting = [
            source
            for source in self._sources
            if name == source.settings.name or name.startswith(f"{source.settings.name}.")
        ]
        return max(fitting, key=lambda source: len(source.settings.name), default=None)


async def _call(source: ToolRunner, name: str, arguments: Mapping[str, Any]) -> ToolOutcome:
    """Calls a tool and limits its outcome. Failures become outcomes inside the task, so that none is unretrieved."""
    try:
        outcome = await source.call(name, arguments)
    except asyncio.CancelledError:
        if task_is_cancelled():
            raise
        outcome = failure("it cancelled itself")
    except WeftError as error:
        outcome = failure(error.message)
    except (Exception, GeneratorExit) as error:  # noqa: BLE001 - any exception of a tool is reported to the model
        outcome = failure(described(error))
    return bounded(outcome, source.settings.max_output_bytes)


def _unavailable(name: str, why: str) -> WeftError:
    return WeftError(Reason.TOOL_UNAVAILABLE, f"the tool {name} cannot be used: {why}", metadata={"tool": name})


MAX_WIRE_NAME_LENGTH = 64
_NOT_ALLOWED = re.compile(r"[^A-Za-z0-9_-]")


def wire_names(names: Iterable[str], taken: Collection[str] = ()) -> dict[str, str]:
    """Returns OpenAI function names by tool name: `files.read` becomes `files_read`, or `files_read_2` if taken.

    The same names in the same order always get the same function names, so that prefix caches stay valid.
    """
    given: dict[str, str] = {}
    used = set(taken)
    for name in names:
        if name not in given:
            given[name] = _unused(_NOT_ALLOWED.sub("_", name) or "tool", used)
            used.add(given[name])
    return given


def _unused(plain: str, used: Collection[str]) -> str:
    wire, number = plain[:MAX_WIRE_NAME_LENGTH], 1
    while wire in used:
        number += 1
        suffix = f"_{number}"
        wire = plain[: MAX_WIRE_NAME_LENGTH - len(suffix)] + suffix
    return wire


def build_tool_box(
    sources: Sequence[ToolSettings],
    *,
    where: str = "tools",
    make_tag: Callable[[], str] = untracked_tag,
    only: Collection[str] | None = None,
) -> ToolBox:
    """Returns the tool box of these sources. `make_tag` returns the tag of an MCP server's processes: Leftovers.begin.

    `only`: the names that can be used; None: all.

    Imports Python tools: raises INVALID_ARGUMENT for an unusable one, naming the field below `where`. MCP servers are
    first contacted by `start`.
    """

    def build(settings: ToolSettings) -> ToolRunner:
        if settings.type == "python":
            return PythonFunction(settings, f"{where}.{settings.name}.function")
        return McpServer(settings, make_tag)

    return ToolBox([build(settings) for settings in sources], only)
