"""The tool port: the interface of tool sources, and outcomes of calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


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


MAX_TOOLS_PER_SOURCE = 256
"""Maximum number of tools of one source; further ones are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDescription:
    """A tool as it is offered to a model."""

    name: str
    """As in the configuration file: `word_count`, or `files.read` for the tool `read` of the MCP server `files`."""
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments, always of an object. Read-only."""
    wire_name: str = ""
    """What the model calls it: letters, digits, `_` and `-`, at most 64. Set and unique within one `ToolBox.pick`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """The outcome of a call, as the model receives it."""

    content: str
    failed: bool = False
    cut: bool = False
    """Whether the output was cut; `content` ends with the number of missing bytes."""


class ToolRunner(Protocol):
    """One source of tools. Lifecycle: start, call*, stop."""

    async def start(self) -> None:
        """Make the tools ready, in bounded time. A server that is down raises nothing: see `why_missing`."""
        ...

    async def stop(self) -> None:
        """End calls and processes. Idempotent and bounded; also after a `start` that was cancelled."""
        ...

    def why_missing(self, name: str) -> str:
        """Returns why a tool is not in `descriptions` now, without addresses and secrets."""
        ...

    def descriptions(self) -> Sequence[ToolDescription]:
        """Returns the tools that can be called now."""
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Run a tool of `descriptions`. May raise: the tool box turns it into an outcome. Can be cancelled."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSource:
    """A tool source with its limits."""

    name: str
    """A Python tool's own name; the prefix of an MCP server's tools."""
    runner: ToolRunner
    timeout_seconds: float = 30.0
    """Timeout of one call."""
    max_output_bytes: int = 65_536
    """Maximum output of one call that a model receives, in bytes of UTF-8."""
    remote: bool = False
    """Whether a call sends bytes off the premises."""


MAX_FAILURE_BYTES = 2048
"""Maximum length of an error text for a model."""


def described(error: BaseException) -> str:
    """Returns an exception's type and message, without a traceback. The message may raise, as foreign code."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - `__str__` may raise anything
        text = "its message cannot be read"
    return f"{type(error).__name__}: {text}"


def failure(message: str) -> ToolOutcome:
    """Builds the outcome of a failed call."""
    return bounded(ToolOutcome(content=f"The tool failed: {message}", failed=True), MAX_FAILURE_BYTES)


def bounded(outcome: ToolOutcome, max_bytes: int) -> ToolOutcome:
    """Returns the outcome with at most `max_bytes` of UTF-8, cut between characters, with the number of missing bytes.

    Lone surrogates, which no message can carry, become question marks.
    """
    # Not the object's own method: a tool may return a subclass of `str` that overrides it.
    encoded = str.encode(outcome.content, errors="replace")
    if len(encoded) <= max_bytes:
        return ToolOutcome(content=encoded.decode(), failed=outcome.failed, cut=outcome.cut)
    kept = encoded[:max_bytes].decode(errors="ignore")
    missing = len(encoded) - len(kept.encode())
    return ToolOutcome(content=f"{kept}\n[cut: {missing} bytes more]", failed=outcome.failed, cut=True)
