"""The runner HTTP API: what one runner can do and how it does, its models' life, and OpenAI inference on it alone."""
