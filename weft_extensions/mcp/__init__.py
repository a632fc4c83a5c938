"""An MCP server at `/mcp`: the mesh's own records, and the tools of its MCP servers, found by search."""
