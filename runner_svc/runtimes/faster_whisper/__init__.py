"""The runtime faster_whisper: Whisper models in its own child process, one per model."""
