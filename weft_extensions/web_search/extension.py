"""The web for models: the server tools `web_search`, by SearXNG or a tool of an MCP server, and `web_fetch`."""

from weft.extension import Extension, ServerToolHook

EXTENSION = Extension(
    name="web_search",
    summary="Web search and pages of the web for models.",
    docs="docs/agents.md",
    server_tools=(
        ServerToolHook(name="web_search", place="weft_extensions.web_search.web_search:KIND"),
        ServerToolHook(name="web_fetch", place="weft_extensions.web_search.web_fetch:KIND"),
    ),
)
