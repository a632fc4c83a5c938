"""Web search for models: the server tool `web_search`, by SearXNG or a tool of an MCP server."""

from weft.extension import Extension, ServerToolHook

EXTENSION = Extension(
    name="web_search",
    summary="Web search for models, by SearXNG or an MCP server.",
    docs="docs/agents.md",
    server_tools=(ServerToolHook(name="web_search", place="weft_extensions.web_search.web_search:KIND"),),
)
