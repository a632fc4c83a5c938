"""Types of media files by their first bytes or their suffix. Nothing is decoded."""

from collections.abc import Mapping
from types import MappingProxyType

UNKNOWN_TYPE = "application/octet-stream"
AUDIO_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "aac": "audio/aac",
        "flac": "audio/flac",
        "m4a": "audio/x-m4a",
        "mp3": "audio/mpeg",
        "mp4": "audio/mp4",
        "mpeg": "audio/mpeg",
        "mpga": "audio/mpeg",
        "oga": "audio/ogg",
        "ogg": "audio/ogg",
        "opus": "audio/ogg",
        "wav": "audio/wav",
        "webm": "audio/webm",
    }
)
"""Types of recordings, by the suffix of their file."""
_SUFFIXES: Mapping[str, str] = MappingProxyType(
    {
        "image/png": "png",
        "image/jpeg": "jpg",
        "image/webp": "webp",
        "image/gif": "gif",
        "audio/aac": "aac",
        "audio/flac": "flac",
        "audio/mpeg": "mp3",
        "audio/ogg": "ogg",
        "audio/opus": "opus",
        "audio/pcm": "pcm",
        "audio/wav": "wav",
        "audio/x-wav": "wav",
    }
)
_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def image_type_of(data: bytes) -> str | None:
    """Returns the type of an image: PNG, JPEG, GIF, WebP or BMP; None for anything else."""
    if data.startswith(_PNG_MAGIC):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    if data.startswith(b"BM"):
        return "image/bmp"
    return None


def audio_type_of(data: bytes) -> str | None:
    """Returns the type of a recording that engines take in a chat: WAV or MP3; None for anything else."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "audio/wav"
    # A tag, or eleven set bits and layer III.
    if data.startswith(b"ID3") or (data[:1] == b"\xff" and data[1:2] and data[1] & 0xE6 == 0xE2):
        return "audio/mpeg"
    return None


def audio_type_of_name(filename: str) -> str:
    """Returns the type of a recording by the suffix of its file; UNKNOWN_TYPE for another one."""
    return AUDIO_TYPES.get(filename.rpartition(".")[2].lower(), UNKNOWN_TYPE)


def suffix_of(media_type: str) -> str:
    """Returns the suffix of a file of a type, without its dot; `bin` for an unknown one."""
    return _SUFFIXES.get(media_type.partition(";")[0].strip().lower(), "bin")
