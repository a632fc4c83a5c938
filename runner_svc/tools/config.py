"""How sources of tools are set up. The host builds these from the configuration file."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """What every source has."""

    timeout_seconds: float = 30.0
    """Longest time for one call."""
    max_output_bytes: int = 65_536
    """Most bytes of UTF-8 that a model is told of one call's output."""
    remote: bool = False
    """Whether a call sends bytes off the premises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonTool:
    """A Python function in the runner's own process."""

    name: str
    function: str
    """`package.module:function`."""
    config_field: str = "function"
    """The configuration field that errors name."""
    limits: ToolLimits = field(default_factory=ToolLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class McpCommand:
    """An MCP server that the runner starts."""

    name: str
    """Prefix of its tools."""
    argv: tuple[str, ...] = field(repr=False)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The whole environment of the program."""
    allow: tuple[str, ...] = ()
    """The server's own names of the tools that may be used; empty: all of them."""
    limits: ToolLimits = field(default_factory=ToolLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class McpHttp:
    """An MCP server that runs already and speaks streamable HTTP."""

    name: str
    """Prefix of its tools."""
    url: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with every request, variables already replaced."""
    allow: tuple[str, ...] = ()
    """The server's own names of the tools that may be used; empty: all of them."""
    limits: ToolLimits = field(default_factory=ToolLimits)


ToolSourceConfig = PythonTool | McpCommand | McpHttp
