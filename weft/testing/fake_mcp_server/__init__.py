"""A scripted MCP server, for tests of whoever calls tools: `python -m weft.testing.fake_mcp_server`."""
