"""The caller of a request, and what it may call."""
