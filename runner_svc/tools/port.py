"""The tool port: settings and interface of tool sources, and outcomes of calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

from annotated_types import Ge, Gt, Le, MaxLen

from weft.kernel.settings.setting_annotations import PUBLIC, SECRET, Name, UrlText
from weft.kernel.values.reach import PROGRAM, TEMPLATE, TOOL


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSettings:
    """A source of tools that the runner runs for models. `type` decides which of the other settings apply."""

    type: Annotated[Literal["python", "mcp_command", "mcp_http"], PUBLIC]
    """A Python function (`python`), an MCP server that the runner starts (`mcp_command`), or a running MCP server
    (`mcp_http`)."""
    name: Annotated[Name, PUBLIC]
    """For `python`: name of the tool. For MCP: prefix of the tool names; the tool `read` of the server `files` is
    `files.read`."""
    function: Annotated[Annotated[str, MaxLen(512)] | None, PROGRAM, PUBLIC] = None
    """For `python`: function, as `package.module:function`. Its annotations define the schema, its docstring the
    description."""
    argv: Annotated[tuple[str, ...], MaxLen(64), PROGRAM, SECRET, PUBLIC] = field(default=(), repr=False)
    """For `mcp_command`: program and arguments, without a shell."""
    environment: Annotated[Mapping[str, str], MaxLen(64), TEMPLATE, SECRET, PUBLIC] = field(
        default_factory=dict, repr=False
    )
    """For `mcp_command`: environment variables of the program, in addition to PATH, HOME and LANG; it inherits no
    others from the runner. `${WEFT_TOOL_...}` is replaced by that environment variable of the runner."""
    url: Annotated[UrlText | None, SECRET, PUBLIC] = field(default=None, repr=False)
    """For `mcp_http`: URL of the server (streamable HTTP)."""
    headers: Annotated[Mapping[str, str], MaxLen(32), TEMPLATE, SECRET, PUBLIC] = field(
        default_factory=dict, repr=False
    )
    """For `mcp_http`: request headers. `${WEFT_TOOL_...}` is replaced by that environment variable of the runner."""
    allow: Annotated[tuple[str, ...], MaxLen(256), TOOL, PUBLIC] = ()
    """For MCP: tools of the server that models may use. Default: all."""
    remote: bool = False
    """Whether tool calls are sent to a remote provider. Only requests with `allow_remote` can then use the tools."""
    timeout_seconds: Annotated[float, Gt(0), Le(3600)] = 30.0
    """Timeout of one call. The model receives a timeout as the result of the call."""
    max_output_bytes: Annotated[int, Ge(256), Le(16_777_216)] = 65_536
    """Maximum size of the output of one call; longer output is truncated and marked as truncated."""

    def __post_init__(self) -> None:
        needed = {"python": "function", "mcp_command": "argv", "mcp_http": "url"}[self.type]
        if not getattr(self, needed):
            raise ValueError(f"a tool of type {self.type} needs {needed}")


MAX_TOOLS_PER_SOURCE = 256
"""Maximum number of tools per source; further ones are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDescription:
    """A tool as offered to a model."""

    name: str
    """The configured name: `word_count`, or `files.read` for the tool `read` of the MCP server `files`."""
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments, always an object. Read-only."""
    wire_name: str = ""
    """The model's name for it: letters, digits, `_` and `-`, at most 64. Set by and unique in `ToolBox.pick`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """The outcome of a call, as the model receives it."""

    content: str
    failed: bool = False
    cut: bool = False
    """Whether the output was cut; `content` then ends with the number of missing bytes."""


class ToolRunner(Protocol):
    """A source of tools. Lifecycle: start, call*, stop."""

    settings: ToolSettings
    """Its settings, with variables substituted and a program's complete environment."""

    async def start(self) -> None:
        """Makes the tools ready, in bounded time. Does not raise if a server is down: see `why_missing`."""
        ...

    async def stop(self) -> None:
        """Ends calls and processes. Idempotent and bounded; also works after a cancelled `start`."""
        ...

    def why_missing(self, name: str) -> str:
        """Returns why a tool is not in `descriptions` now, without addresses and secrets."""
        ...

    def descriptions(self) -> Sequence[ToolDescription]:
        """Returns the tools that can currently be called."""
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Runs a tool of `descriptions`. May raise: the tool box converts that to an outcome. Can be cancelled."""
        ...


MAX_FAILURE_BYTES = 2048
"""Maximum length of an error text for a model."""


def described(error: BaseException) -> str:
    """Returns an exception's type and message without a traceback. The message is foreign code and may raise."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - `__str__` may raise anything
        text = "its message cannot be read"
    return f"{type(error).__name__}: {text}"


def failure(message: str) -> ToolOutcome:
    """Returns the outcome of a failed call."""
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
