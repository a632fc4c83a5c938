"""The runtime piper."""
