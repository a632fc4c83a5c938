"""The HTTP API of one runner: capabilities, health, load and unload of its models, and OpenAI inference on it alone."""
