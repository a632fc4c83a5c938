"""Small valid and broken images and recordings, written byte by byte without a codec."""

import struct
import zlib

SAMPLE_RATE = 8000


def png(width: int, height: int, *, frames: int = 0, pixels: bool = True) -> bytes:
    """Returns a grey PNG; with `frames` an APNG that declares that many; without `pixels` only its header."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [_png_chunk(b"IHDR", header)]
    if frames:
        chunks.append(_png_chunk(b"acTL", struct.pack(">II", frames, 0)))
    if pixels:
        rows = b"".join(b"\0" + b"\x80" * width for _ in range(height))
        chunks.append(_png_chunk(b"IDAT", zlib.compress(rows)))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks) + _png_chunk(b"IEND", b"")


def _png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def gif(width: int, height: int, *, frames: int = 1) -> bytes:
    """Returns a GIF whose frames have one sub-block each."""
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x44\x01\x00"
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6) + frame * frames + b"\x3b"


def jpeg(width: int, height: int) -> bytes:
    """Returns the markers of a JPEG up to its scan."""
    app0 = b"\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00"
    frame = b"\xff\xc0\x00\x0b\x08" + struct.pack(">HH", height, width) + b"\x01\x01\x11\x00"
    return b"\xff\xd8" + app0 + frame + b"\xff\xda\x00\x02\xff\xd9"


def webp(width: int, height: int, *, frames: int = 0) -> bytes:
    """Returns an extended WebP: a canvas, and `frames` empty frames."""
    canvas = bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    content = _riff_chunk(b"VP8X", canvas) + _riff_chunk(b"ANMF", bytes(16)) * frames
    return b"RIFF" + struct.pack("<I", 4 + len(content)) + b"WEBP" + content


def webp_lossless(width: int, height: int) -> bytes:
    """Returns a simple lossless WebP."""
    bits = (width - 1) | (height - 1) << 14
    content = _riff_chunk(b"VP8L", b"\x2f" + struct.pack("<I", bits) + bytes(1))
    return b"RIFF" + struct.pack("<I", 4 + len(content)) + b"WEBP" + content


def bmp(width: int, height: int) -> bytes:
    """Returns the headers of a top-down BMP."""
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, width, -height, 1, 24, *[0] * 6)


def wav(*, seconds: float, said_seconds: float | None = None, channels: int = 1) -> bytes:
    """Returns 8-bit silence. `said_seconds`: a false duration for the header."""
    sound = bytes(int(seconds * SAMPLE_RATE) * channels)
    length = len(sound) if said_seconds is None else int(said_seconds * SAMPLE_RATE) * channels
    form = struct.pack("<HHIIHH", 1, channels, SAMPLE_RATE, SAMPLE_RATE * channels, channels, 8)
    content = _riff_chunk(b"fmt ", form) + struct.pack("<4sI", b"data", length) + sound
    return b"RIFF" + struct.pack("<I", 4 + len(content)) + b"WAVE" + content


def mp3(*, frames: int, tag: bytes = b"") -> bytes:
    """Returns frames of MPEG 1, layer III, at 32 kbit/s and 44.1 kHz: 104 bytes and 26 ms each."""
    start = b"ID3\x04\x00\x00" + struct.pack(">I", len(tag)) + tag if tag else b""
    return start + (b"\xff\xfb\x10\x00" + bytes(100)) * frames


def _riff_chunk(kind: bytes, content: bytes) -> bytes:
    return kind + struct.pack("<I", len(content)) + content + b"\0" * (len(content) & 1)
