"""The environment of ExLlamaV3."""
