"""Media types of files, detected from their first bytes or suffix without decoding."""

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
"""Audio types by file suffix."""
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
    """Returns the type of a PNG, JPEG, GIF, WebP or BMP image; None for anything else."""
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
    """Returns the type of a WAV or MP3 recording, which engines accept in a chat; None for anything else."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "audio/wav"
    # An ID3 tag, or a frame: eleven set bits and layer III.
    if data.startswith(b"ID3") or (data[:1] == b"\xff" and data[1:2] and data[1] & 0xE6 == 0xE2):
        return "audio/mpeg"
    return None


def audio_type_of_name(filename: str) -> str:
    """Returns the audio type by file suffix; UNKNOWN_TYPE for another suffix."""
    return AUDIO_TYPES.get(filename.rpartition(".")[2].lower(), UNKNOWN_TYPE)


def suffix_of(media_type: str) -> str:
    """Returns the file suffix of a media type, without the dot; `bin` for an unknown type."""
    return _SUFFIXES.get(media_type.partition(";")[0].strip().lower(), "bin")
