"""The environment of vLLM."""
