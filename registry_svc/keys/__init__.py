"""API keys and join tokens: created, listed, rotated and revoked."""
