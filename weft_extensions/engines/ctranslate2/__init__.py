"""The runtime ctranslate2: the library in its own child process, one per model."""
