"""Providers with Anthropic's Messages API: payloads to requests, and their streams to events."""
