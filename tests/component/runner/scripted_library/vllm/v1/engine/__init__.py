"""A part of the stand-in for vLLM."""
