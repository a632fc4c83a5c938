"""The size of an image by its header, without decoding it: width, height and frames of PNG, JPEG, GIF, WebP and BMP.

Every function reads bounded steps of what it is given and returns None for a file that is not what its first bytes
say. Formats: PNG and APNG (W3C), JPEG (ITU T.81), GIF89a, WebP (RFC 9649), BMP (the headers of OS/2 and Windows).
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MAX_STEPS = 60_000
"""Chunks, segments or blocks looked at in one file, some 30 ms; a GIF of 10 MiB has 42,000 full blocks."""


@dataclass(frozen=True, slots=True)
class ImageSize:
    """What an image's header says; `frames` may stop counting at the bound that was given."""

    width: int
    height: int
    frames: int = 1


PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_BMP_INFO_SIZES = frozenset({12, 40, 52, 56, 64, 108, 124})
# Start of frame, without the tables (C4, CC) and the reserved one (C8).
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_STANDALONE = frozenset({0x01, *range(0xD0, 0xD8)})
_JPEG_SCAN = 0xDA


def media_type_of(data: bytes) -> str | None:
    """Returns the type of an image by its first bytes; None for anything else."""
    if data.startswith(PNG_MAGIC):
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


def size_of(data: bytes, media_type: str, max_frames: int) -> ImageSize | None:
    """The size of an image of this type; None where its header is broken. Counts no further than `max_frames` + 1."""
    try:
        return _READERS[media_type](data, max_frames)
    except (struct.error, IndexError):
        return None


def _png(data: bytes, max_frames: int) -> ImageSize | None:
    if data[12:16] != b"IHDR" or data[8:12] != b"\x00\x00\x00\x0d":
        return None
    width, height = struct.unpack_from(">II", data, 16)
    frames, counted, position = 1, 0, 33
    for _ in range(MAX_STEPS):
        if position + 8 > len(data):
            break
        length, kind = struct.unpack_from(">I4s", data, position)
        if kind == b"acTL":
            frames = max(frames, struct.unpack_from(">I", data, position + 8)[0])
        elif kind == b"fcTL":
            counted += 1
        if kind == b"IEND" or max(frames, counted) > max_frames:
            break
        position += 12 + length
    else:
        return None
    return ImageSize(width, height, max(frames, counted))


def _jpeg(data: bytes, max_frames: int) -> ImageSize | None:  # noqa: ARG001 - the readers share a form
    position = 2
    for _ in range(MAX_STEPS):
        if data[position] != 0xFF:
            return None
        marker = data[position + 1]
        if marker == 0xFF:
            position += 1
            continue
        if marker in _JPEG_STANDALONE:
            position += 2
            continue
        if marker == _JPEG_SCAN:
            return None
        if marker in _JPEG_FRAMES:
            height, width = struct.unpack_from(">HH", data, position + 5)
            return ImageSize(width, height)
        position += 2 + max(2, struct.unpack_from(">H", data, position + 2)[0])
    return None


def _gif(data: bytes, max_frames: int) -> ImageSize | None:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    position, frames, in_blocks = 13 + _colours(flags), 0, False
    for _ in range(MAX_STEPS):
        if position >= len(data) or frames > max_frames:
            break
        first = data[position]
        if in_blocks:
            in_blocks, position = first != 0, position + first + 1
        elif first == 0x21:
            in_blocks, position = True, position + 2
        elif first == 0x2C:
            frames += 1
            left, top, across, down, local = struct.unpack_from("<HHHHB", data, position + 1)
            # A frame may be larger than the canvas; readers then grow it.
            width, height = max(width, left + across), max(height, top + down)
            in_blocks, position = True, position + 11 + _colours(local)
        else:
            break
    else:
        return None
    return ImageSize(width, height, frames) if frames else None


def _colours(flags: int) -> int:
    """Returns the size in bytes of the colour table that these flags announce."""
    return 3 * 2 ** ((flags & 7) + 1) if flags & 0x80 else 0


def _webp(data: bytes, max_frames: int) -> ImageSize | None:
    size: ImageSize | None = None
    frames, position = 0, 12
    for _ in range(MAX_STEPS):
        if position + 8 > len(data) or frames > max_frames:
            break
        kind, length = struct.unpack_from("<4sI", data, position)
        if kind == b"ANMF":
            frames += 1
        elif kind in _WEBP_SIZES:
            found = _WEBP_SIZES[kind](data, position + 8)
            if found is None:
                return None
            # The canvas comes first where there is one; a picture beside it may lie about it.
            size = found if size is None else ImageSize(max(size.width, found.width), max(size.height, found.height))
        position += 8 + length + (length & 1)
    else:
        return None
    return None if size is None else ImageSize(size.width, size.height, max(1, frames))


def _vp8x(data: bytes, start: int) -> ImageSize | None:
    field = data[start + 4 : start + 10]
    if len(field) < 6:
        return None
    return ImageSize(int.from_bytes(field[:3], "little") + 1, int.from_bytes(field[3:], "little") + 1)


def _vp8(data: bytes, start: int) -> ImageSize | None:
    if data[start + 3 : start + 6] != b"\x9d\x01\x2a":
        return None
    width, height = struct.unpack_from("<HH", data, start + 6)
    return ImageSize(width & 0x3FFF, height & 0x3FFF)


def _vp8l(data: bytes, start: int) -> ImageSize | None:
    if data[start] != 0x2F:
        return None
    bits = struct.unpack_from("<I", data, start + 1)[0]
    return ImageSize((bits & 0x3FFF) + 1, ((bits >> 14) & 0x3FFF) + 1)


def _bmp(data: bytes, max_frames: int) -> ImageSize | None:  # noqa: ARG001 - the readers share a form
    header = struct.unpack_from("<I", data, 14)[0]
    if header not in _BMP_INFO_SIZES:
        return None
    if header == 12:
        width, height = struct.unpack_from("<HH", data, 18)
    else:
        width, height = struct.unpack_from("<ii", data, 18)
    # Rows from the top down have a negative height.
    return ImageSize(width, abs(height))


_WEBP_SIZES: Mapping[bytes, Callable[[bytes, int], ImageSize | None]] = {b"VP8X": _vp8x, b"VP8 ": _vp8, b"VP8L": _vp8l}
_READERS: Mapping[str, Callable[[bytes, int], ImageSize | None]] = {
    "image/png": _png,
    "image/jpeg": _jpeg,
    "image/gif": _gif,
    "image/webp": _webp,
    "image/bmp": _bmp,
}
