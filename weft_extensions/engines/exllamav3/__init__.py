"""The runtime exllamav3: the library in its own child process, one per model."""
