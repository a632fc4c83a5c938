"""The tool `web_search`: one search by the provider that weft.yaml names."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from typing_extensions import override

from gateway.gateway_config import GatewayConfig, WebSearchConfig
from gateway.server_tools.pages import is_wanted
from gateway.server_tools.tool import (
    CallError,
    CallOptions,
    Page,
    ServerTool,
    ServerToolKind,
    ToolAnswer,
    ToolCalls,
)

MAX_QUERY_CHARS = 400
"""Maximum length of a query; search engines cut longer ones."""
MAX_SITE_TERMS = 8
"""Maximum number of domains that are added to a query; more are only checked on the results."""


class Provider(Protocol):
    """Searches the web."""

    host: str
    """The host that queries are sent to."""

    async def search(self, query: str) -> ToolAnswer:
        """Returns all that was found, in order. Failures become errors."""
        ...


class WebSearch(ServerTool):
    """Searches, and keeps the results of the wanted domains."""

    description: ClassVar[str] = (
        "Searches the web. Returns titles, URLs and excerpts of pages. Use it for anything that may have changed since "
        "your training, and search again with other words if the results do not answer the question."
    )
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "What to search for, in a few words."}},
        "required": ["query"],
    }

    def __init__(self, provider: Provider, config: WebSearchConfig) -> None:
        self._provider = provider
        self._config = config
        self.host = provider.host
        self.max_uses = config.max_uses
        self.timeout_seconds = config.timeout_seconds
        self.max_text_bytes = config.max_result_bytes

    @override
    async def run(self, arguments: Mapping[str, Any], options: CallOptions) -> ToolAnswer:
        query = arguments.get("query")
        if not isinstance(query, str) or not query.strip():
            return ToolAnswer(error=CallError.INVALID_INPUT, why="the model sent no query")
        if len(query) > MAX_QUERY_CHARS:
            return ToolAnswer(error=CallError.QUERY_TOO_LONG, why=f"the query has {len(query)} characters")
        found = await self._provider.search(f"{' '.join(query.split())}{site_terms(options)}")
        wanted = distinct(page for page in found.pages if is_wanted(page.url, options))
        most = min(self._config.max_results, options.max_results or self._config.max_results)
        return ToolAnswer(
            pages=wanted[:most],
            error=found.error,
            sent_bytes=found.sent_bytes,
            received_bytes=found.received_bytes,
            why=found.why,
        )


def site_terms(options: CallOptions) -> str:
    """Returns the domains of a request as terms of a query; empty for none, or for too many."""
    allowed, blocked = options.allowed_domains, options.blocked_domains
    if len(allowed) + len(blocked) > MAX_SITE_TERMS:
        return ""
    if len(allowed) == 1:
        return f" site:{allowed[0]}"
    if allowed:
        return f" ({' OR '.join(f'site:{domain}' for domain in allowed)})"
    return "".join(f" -site:{domain}" for domain in blocked)


def distinct(pages: Iterable[Page]) -> Sequence[Page]:
    """Returns the pages, of several with one URL the first."""
    found: dict[str, Page] = {}
    for page in pages:
        found.setdefault(page.url, page)
    return tuple(found.values())


def open_search(config: GatewayConfig, calls: ToolCalls | None) -> ServerTool | None:
    """Returns the search of one gateway; None: no provider is configured."""
    section = config.web_search
    if section.url:
        from weft_extensions.web_search.searxng import SearXng  # noqa: PLC0415 - its HTTP client takes memory

        return WebSearch(SearXng(section), section)
    if section.tool and calls is not None:
        from weft_extensions.web_search.mcp_search import McpSearch  # noqa: PLC0415 - most meshes have none

        return WebSearch(McpSearch(section.tool, calls), section)
    return None


KIND = ServerToolKind(open=open_search)
