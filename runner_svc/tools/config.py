"""Configuration of tool sources: Python functions and MCP servers."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """Limits of one tool source."""

    timeout_seconds: float = 30.0
    """Timeout of one call."""
    max_output_bytes: int = 65_536
    """Maximum output of one call that a model receives, in bytes of UTF-8."""
    remote: bool = False
    """Whether a call sends data off the premises."""


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
    """The complete environment of the program."""
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
    """Headers of every request, with variables already substituted."""
    allow: tuple[str, ...] = ()
    """The server's own names of the tools that may be used; empty: all of them."""
    limits: ToolLimits = field(default_factory=ToolLimits)


ToolSourceConfig = PythonTool | McpCommand | McpHttp
