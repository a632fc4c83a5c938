"""The environment of vLLM, served and in process."""
