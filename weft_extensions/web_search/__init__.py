"""Web search and pages of the web, as tools that the gateway runs for models."""
