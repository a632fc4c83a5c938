"""API keys: made, listed, rotated and revoked here; whoever checks them watches."""
