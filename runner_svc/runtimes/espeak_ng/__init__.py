"""The runtime espeak_ng."""
