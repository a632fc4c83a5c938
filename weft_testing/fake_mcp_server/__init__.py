"""A scripted MCP server for tests of tool calls: `python -m weft_testing.fake_mcp_server`."""
