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
        "audio/mp4": "mp4",
        "audio/mpeg": "mp3",
        "audio/ogg": "ogg",
        "audio/opus": "opus",
        "audio/pcm": "pcm",
        "audio/wav": "wav",
        "audio/webm": "webm",
        "audio/x-m4a": "m4a",
        "audio/x-wav": "wav",
    }
)
AUDIO_FORMATS = "WAV, MP3, FLAC, Ogg, MP4, WebM or AAC"
"""What `audio_type_of` knows, for people."""
_AUDIO_MAGIC: Mapping[bytes, str] = MappingProxyType(
    {b"fLaC": "audio/flac", b"OggS": "audio/ogg", b"\x1aE\xdf\xa3": "audio/webm"}
)
_IMAGE_BRANDS = frozenset({b"heic", b"heix", b"hevc", b"mif1", b"msf1", b"avif", b"avis"})
_OTHER_MAGIC: Mapping[bytes, str] = MappingProxyType(
    {
        b"%pdf": "a PDF document",
        b"<svg": "image/svg+xml",
        b"<?xml": "an XML or SVG document",
        b"<!doctype html": "an HTML page",
        b"<html": "an HTML page",
        b"ii*\0": "image/tiff",
        b"mm\0*": "image/tiff",
        b"form": "audio/aiff",
        b"#!amr": "audio/amr",
        b"pk\x03\x04": "a ZIP file",
        b"{": "JSON",
    }
)
"""Beginnings, in lower case, of files that clients take for media."""
_HEAD_BYTES = 64
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
    """Returns the type of a WAV, MP3, FLAC, Ogg, MP4, WebM or AAC recording; None for anything else."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "audio/wav"
    if data[4:8] == b"ftyp":
        # HEIC and AVIF images are in the same container.
        return None if data[8:12] in _IMAGE_BRANDS else "audio/mp4"
    for magic, media_type in _AUDIO_MAGIC.items():
        if data.startswith(magic):
            return media_type
    # ADTS: twelve set bits, and layer 0.
    if data[:1] == b"\xff" and data[1:2] and data[1] & 0xF6 == 0xF0:
        return "audio/aac"
    # An ID3 tag, or a frame: eleven set bits and layer III.
    if data.startswith(b"ID3") or (data[:1] == b"\xff" and data[1:2] and data[1] & 0xE6 == 0xE2):
        return "audio/mpeg"
    return None


def shown_type(data: bytes) -> str:
    """Returns what a file that is no supported media is, for an error."""
    known = image_type_of(data) or audio_type_of(data)
    head = data[:_HEAD_BYTES].lstrip().lower()
    if known is None and data[4:8] == b"ftyp":
        known = f"image/{'avif' if data[8:11] == b'avi' else 'heic'}"
    return known or next((name for magic, name in _OTHER_MAGIC.items() if head.startswith(magic)), "of no known type")


def audio_type_of_name(filename: str) -> str:
    """Returns the audio type by file suffix; UNKNOWN_TYPE for another suffix."""
    return AUDIO_TYPES.get(filename.rpartition(".")[2].lower(), UNKNOWN_TYPE)


def suffix_of(media_type: str) -> str:
    """Returns the file suffix of a media type, without the dot; `bin` for an unknown type."""
    return _SUFFIXES.get(media_type.partition(";")[0].strip().lower(), "bin")
