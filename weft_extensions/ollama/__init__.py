"""Ollama's API: request schemas, translation to the mesh's messages, answers and streams of JSON lines."""
