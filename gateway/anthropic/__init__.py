"""Anthropic's Messages API: request schemas, translation to the mesh's messages, answers and streams."""
