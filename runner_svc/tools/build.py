"""From the configuration of tools to the box."""

from collections.abc import Callable, Sequence

from runner_svc.tools.box import ToolBox
from runner_svc.tools.config import PythonTool, ToolSourceConfig
from runner_svc.tools.mcp_servers import McpServer, untracked_tag
from runner_svc.tools.port import ToolRunner, ToolSource
from runner_svc.tools.python_functions import PythonFunction


def build_tool_box(sources: Sequence[ToolSourceConfig], *, make_tag: Callable[[], str] = untracked_tag) -> ToolBox:
    """The box of these sources, not yet started. `make_tag` marks the processes of each MCP server: Leftovers.begin.

    Imports Python tools: raises INVALID_ARGUMENT naming the field of one that cannot be used. MCP servers are left
    alone until `start`.
    """
    return ToolBox([_source(config, make_tag) for config in sources])


def _source(config: ToolSourceConfig, make_tag: Callable[[], str]) -> ToolSource:
    runner: ToolRunner = PythonFunction(config) if isinstance(config, PythonTool) else McpServer(config, make_tag)
    return ToolSource(
        name=config.name,
        runner=runner,
        timeout_seconds=config.limits.timeout_seconds,
        max_output_bytes=config.limits.max_output_bytes,
        remote=config.limits.remote,
    )
