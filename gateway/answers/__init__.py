"""Responses: complete, streamed as server-sent events, and binary."""
