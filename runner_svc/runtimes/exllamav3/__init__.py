"""The runtime exllamav3: the library in a child process of its own, one per model."""
