"""The environment of faster-whisper."""
