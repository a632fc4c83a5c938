"""Tools of configured MCP servers that a gateway calls itself, such as its web search."""

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runner_svc.runner_settings import RunnerSettings
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.compose.tool_sources import tool_sources

if TYPE_CHECKING:
    from runner_svc.tools.port import ToolSettings
    from runner_svc.tools.tool_box import ToolBox


class GatewayTools:
    """Calls tools by `RUNNER/SERVER.TOOL`. Connects to a server for its first call, and after its settings change."""

    def __init__(self, runners: Callable[[], Sequence[RunnerSettings]]) -> None:
        """`runners`: returns the runners of the newest weft.yaml."""
        self._runners = runners
        self._boxes: dict[str, tuple[ToolSettings, ToolBox]] = {}
        """By `RUNNER/SERVER`."""
        self._connecting = defaultdict[str, asyncio.Lock](asyncio.Lock)
        """So that calls at the same time do not start a server's program twice."""

    async def __call__(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns the text that a tool answers. Raises TOOL_UNAVAILABLE, also for a failed call."""
        server = max((each for each in self.servers() if name.startswith(f"{each}.")), key=len, default="")
        if not server:
            raise _unavailable(name, "weft.yaml has no such MCP server in `runners`")
        outcome = await (await self._connected(server)).run(name.partition("/")[2], arguments)
        if outcome.failed:
            # Its words may quote the query.
            raise _unavailable(name, "its call failed")
        return outcome.content

    def servers(self) -> Mapping[str, RunnerSettings]:
        """Returns the runners of the MCP servers in the configuration, by `RUNNER/SERVER`."""
        return {
            f"{section.name}/{source.name}": section
            for section in self._runners()
            for source in section.tools
            if source.type != "python"
        }

    async def boxes(self) -> Mapping[str, "ToolBox"]:
        """Connects to all servers, and returns their tools. One that is down has none. Raises as `tool_sources`."""
        names = tuple(self.servers())
        return dict(zip(names, await asyncio.gather(*map(self._connected, names)), strict=True))

    async def _connected(self, server: str) -> "ToolBox":
        async with self._connecting[server]:
            servers = self.servers()
            await self._disconnect(self._boxes.keys() - servers.keys())
            sources = {each.name: each for each in tool_sources(servers[server], os.environ)}
            settings = sources[server.partition("/")[2]]
            if server not in self._boxes or self._boxes[server][0] != settings:
                from runner_svc.tools.tool_box import build_tool_box  # noqa: PLC0415 - most gateways call no tool

                await self._disconnect([server])
                box = build_tool_box([settings])
                await box.start()
                self._boxes[server] = settings, box
            return self._boxes[server][1]

    async def stop(self) -> None:
        """Disconnects."""
        await self._disconnect(list(self._boxes))

    async def _disconnect(self, servers: Iterable[str]) -> None:
        former = [self._boxes.pop(each) for each in servers if each in self._boxes]
        for _, box in former:
            await box.stop()


def _unavailable(name: str, why: str) -> WeftError:
    return WeftError(Reason.TOOL_UNAVAILABLE, f"the tool {name} cannot be used: {why}", metadata={"tool": name})
