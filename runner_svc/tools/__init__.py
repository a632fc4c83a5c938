"""Tools that the runner runs for models: Python functions and MCP servers behind one port."""
