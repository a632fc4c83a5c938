"""`/api/v1/keys`: API keys, for callers who show one that may manage them."""
