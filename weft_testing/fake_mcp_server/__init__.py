"""A scripted MCP server, for tests of whoever calls tools: `python -m weft_testing.fake_mcp_server`."""
