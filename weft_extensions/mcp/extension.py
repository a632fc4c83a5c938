"""An MCP server at `/mcp`, so that agents can ask the mesh about itself and use its tools."""

from weft.extension import ApiHook, Extension

EXTENSION = Extension(
    name="mcp",
    summary="An MCP server: the mesh's records and tools for agents.",
    docs="docs/agents.md",
    apis=(ApiHook(place="weft_extensions.mcp.endpoint:API", paths=("/mcp",)),),
)
