"""Estimated waits and status messages."""
