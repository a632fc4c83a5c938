"""The port of a tool that a gateway runs for models. What `ServerToolHook.place` names is a `ServerToolKind`."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from gateway.gateway_config import GatewayConfig


class CallError(StrEnum):
    """Why a call failed, in the words of Anthropic's API."""

    INVALID_INPUT = "invalid_tool_input"
    UNAVAILABLE = "unavailable"
    MAX_USES = "max_uses_exceeded"
    TOO_MANY_REQUESTS = "too_many_requests"
    QUERY_TOO_LONG = "query_too_long"
    URL_TOO_LONG = "url_too_long"
    URL_NOT_ALLOWED = "url_not_allowed"
    URL_NOT_IN_CONTEXT = "url_not_in_prior_context"
    URL_NOT_ACCESSIBLE = "url_not_accessible"
    UNSUPPORTED_CONTENT_TYPE = "unsupported_content_type"
    CONTENT_TOO_LARGE = "content_too_large"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page that a tool found. Its texts are untrusted."""

    url: str
    title: str = ""
    text: str = ""
    age: str = ""
    """When it was published, as the service says; empty: unknown."""
    retrieved_at: str = ""
    """When it was fetched, in ISO 8601; empty: it was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What a request asks of a tool."""

    allowed_domains: tuple[str, ...] = ()
    """Hosts without a scheme, their subdomains included, with a path or not. Empty: all."""
    blocked_domains: tuple[str, ...] = ()
    max_results: int | None = None
    """None: as many as the tool gives."""
    max_text_bytes: int | None = None
    """Maximum size of the text of one page; None: the tool's."""
    appears: Callable[[str], bool] = lambda _url: False
    """Whether the caller or a tool's result named a URL of `canonical_url` before the model's turn."""
    on_host: Callable[[str], None] = lambda _host: None
    """Gets each host before bytes are sent to it, if that is not `ServerTool.host`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """What a call found, and what left the mesh for it."""

    pages: Sequence[Page] = ()
    error: CallError | None = None
    sent_bytes: int = 0
    """0: nothing left the mesh."""
    received_bytes: int = 0
    why: str = ""
    """The cause of an error, for the log: without the query."""


class ServerTool(ABC):
    """A tool that a gateway runs. Its calls may overlap."""

    description: ClassVar[str]
    """For the model."""
    parameters: ClassVar[Mapping[str, Any]]
    """JSON schema of its arguments."""
    host: str
    """The host that calls reach, for receipts and logs; empty: see `CallOptions.on_host`."""
    max_uses: int
    """Maximum number of calls for one request."""
    timeout_seconds: float
    """How long one call may take."""
    max_text_bytes: int
    """Maximum size of the text of one page."""

    @abstractmethod
    async def run(self, arguments: Mapping[str, Any], options: CallOptions) -> ToolAnswer:
        """Calls it with arguments that the model wrote, which need not fit `parameters`. Failures become errors."""


ToolCalls = Callable[[str, Mapping[str, Any]], Awaitable[str]]
"""Calls a tool of an MCP server of the configuration, by `RUNNER/SERVER.TOOL`. Raises TOOL_UNAVAILABLE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerToolKind:
    """One tool that gateways can run."""

    open: Callable[[GatewayConfig, ToolCalls | None], ServerTool | None]
    """Returns the tool of one gateway; None: it is not configured. Second argument: None: there are no MCP servers."""
