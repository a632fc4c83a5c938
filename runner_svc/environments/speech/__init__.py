"""The environment of text to speech."""
