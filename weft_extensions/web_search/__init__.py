"""Web search as a tool that the gateway runs for models."""
