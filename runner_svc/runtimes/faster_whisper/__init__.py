"""The runtime faster_whisper: Whisper models in a child process of its own, one per model."""
