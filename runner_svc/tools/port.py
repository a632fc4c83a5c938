"""The tool port: what the chat loop asks of a source of tools."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

MAX_TOOLS_PER_SOURCE = 256
"""Tools taken from one source; further ones are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDescription:
    """A tool as a model is told of it."""

    name: str
    """As in the configuration file: `word_count`, or `files.read` for the tool `read` of the MCP server `files`."""
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments, always of an object. Only ever read."""
    wire_name: str = ""
    """What the model calls it: letters, digits, `_` and `-`, at most 64. Set and unique within one `ToolBox.pick`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """What came of a call, as the model is told."""

    content: str
    failed: bool = False
    cut: bool = False
    """Whether the tool said more; `content` ends with how much."""


class ToolRunner(Protocol):
    """One source of tools. Life cycle: start, call*, stop."""

    async def start(self) -> None:
        """Make the tools ready, in bounded time. A server that is down does not raise: see `why_missing`."""
        ...

    async def stop(self) -> None:
        """End calls and processes. Idempotent and bounded; also after a `start` that was cancelled."""
        ...

    def why_missing(self, name: str) -> str:
        """Why a tool is not among `descriptions` right now, for whoever asked for it: no addresses, no secrets."""
        ...

    def descriptions(self) -> Sequence[ToolDescription]:
        """The tools that can be called now."""
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Run a tool of `descriptions`. May raise: the box makes an outcome of it. Cancelling it ends the call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSource:
    """A source with its limits."""

    name: str
    """A Python tool's own name; the prefix of an MCP server's tools."""
    runner: ToolRunner
    timeout_seconds: float = 30.0
    """Longest time for one call."""
    max_output_bytes: int = 65_536
    """Most bytes of UTF-8 that a model is told of one call's output."""
    remote: bool = False
    """Whether a call sends bytes off the premises."""
