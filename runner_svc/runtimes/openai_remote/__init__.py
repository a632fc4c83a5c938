"""Runtime openai_remote: a provider off the premises."""
