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


MAX_FAILURE_BYTES = 2048
"""Most of an error text that a model is told."""


def described(error: BaseException) -> str:
    """An exception by its type and message, without a trace. The message is a stranger's code, which may fail too."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - whatever `__str__` raises
        text = "its message cannot be read"
    return f"{type(error).__name__}: {text}"


def failure(message: str) -> ToolOutcome:
    """The outcome of a call that did not succeed."""
    return bounded(ToolOutcome(content=f"The tool failed: {message}", failed=True), MAX_FAILURE_BYTES)


def bounded(outcome: ToolOutcome, max_bytes: int) -> ToolOutcome:
    """The outcome with at most `max_bytes` of UTF-8, cut between characters; the text says how much is missing.

    Half surrogates, which no message can carry, become question marks.
    """
    # Not the text's own method: a tool may return a kind of `str` that has another.
    encoded = str.encode(outcome.content, errors="replace")
    if len(encoded) <= max_bytes:
        return ToolOutcome(content=encoded.decode(), failed=outcome.failed, cut=outcome.cut)
    kept = encoded[:max_bytes].decode(errors="ignore")
    missing = len(encoded) - len(kept.encode())
    return ToolOutcome(content=f"{kept}\n[cut: {missing} bytes more]", failed=outcome.failed, cut=True)
