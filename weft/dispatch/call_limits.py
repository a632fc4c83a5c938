"""Bounds of reranking, images and sound that HTTP and gRPC share. OpenAI's own where it has one."""

MAX_DOCUMENTS = 1024
MAX_IMAGES = 10
MAX_SOURCE_IMAGES = 16
MAX_IMAGE_PROMPT_CHARS = 32_000
MAX_SPEECH_CHARS = 4096
"""Of the words that are spoken, and of how they are to be said."""
MAX_TRANSCRIPTION_PROMPT_CHARS = 4096
MAX_WORD_CHARS = 64
"""A voice, a language, a size, a quality."""
MIN_SPEED, MAX_SPEED = 0.25, 4.0
IMAGE_FORMATS = ("png", "jpeg", "webp")
SPEECH_FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")
