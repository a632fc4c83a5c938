"""The runtime faster_whisper: Whisper models, each in its own child process."""
