"""Runtime openai_remote: a remote provider."""
