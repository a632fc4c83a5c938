"""Responses: unary, streamed as server-sent events, files and recordings; warnings and chunks of answers."""
