"""Types of media files by their first bytes."""

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
