"""API keys and join tokens."""
