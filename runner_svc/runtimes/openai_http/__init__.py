"""Runtime openai_http: an external OpenAI-compatible server."""
