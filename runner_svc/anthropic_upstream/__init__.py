"""Translates between weft's messages and providers with Anthropic's Messages API."""
