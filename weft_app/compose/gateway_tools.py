"""Tools of configured MCP servers that a gateway calls itself, such as its web search."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runner_svc.runner_settings import RunnerSettings
from runner_svc.tools.port import ToolSettings
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.compose.tool_sources import tool_sources

if TYPE_CHECKING:
    from runner_svc.tools.tool_box import ToolBox


class GatewayTools:
    """Calls tools by `RUNNER/SERVER.TOOL`. Connects to a server for its first call, and after its settings change."""

    def __init__(self, runners: Callable[[], Sequence[RunnerSettings]]) -> None:
        """`runners`: returns the runners of the newest weft.yaml."""
        self._runners = runners
        self._settings: ToolSettings | None = None
        self._box: ToolBox | None = None
        self._connecting = asyncio.Lock()
        """So that calls at the same time do not start a server's program twice."""

    async def __call__(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns the text that a tool answers. Raises TOOL_UNAVAILABLE, also for a failed call."""
        runner, _, tool = name.partition("/")
        found = self._find(runner, tool)
        if found is None:
            raise _unavailable(name, "weft.yaml has no such MCP server in `runners`")
        outcome = await (await self._connected(found)).run(tool, arguments)
        if outcome.failed:
            # Its words may quote the query.
            raise _unavailable(name, "its call failed")
        return outcome.content

    async def _connected(self, settings: ToolSettings) -> "ToolBox":
        async with self._connecting:
            if self._box is None or settings != self._settings:
                from runner_svc.tools.tool_box import build_tool_box  # noqa: PLC0415 - most gateways call no tool

                await self.stop()
                box = build_tool_box([settings])
                await box.start()
                self._box, self._settings = box, settings
            return self._box

    async def stop(self) -> None:
        """Disconnects."""
        former, self._box = self._box, None
        if former is not None:
            await former.stop()

    def _find(self, runner: str, tool: str) -> ToolSettings | None:
        for section in self._runners():
            for source in section.tools if section.name == runner else ():
                if source.type != "python" and tool.startswith(f"{source.name}."):
                    return next(each for each in tool_sources(section, os.environ) if each.name == source.name)
        return None


def _unavailable(name: str, why: str) -> WeftError:
    return WeftError(Reason.TOOL_UNAVAILABLE, f"the tool {name} cannot be used: {why}", metadata={"tool": name})
