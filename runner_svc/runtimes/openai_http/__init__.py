"""Runtime openai_http: an OpenAI-compatible server that runs already."""
