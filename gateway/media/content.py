"""Validation of media files: type by the first bytes, limits of size and duration.

Files are not decoded, because decoders are a target of attacks. SVG, playlists and other types that reference further
files have none of the accepted signatures. Functions over headers read a bounded number of steps, and return None for a
file that does not match its signature. Formats: PNG and APNG (W3C), JPEG (ITU T.81), GIF89a, WebP (RFC 9649), BMP, WAV
and MP3.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.gateway_config import MediaConfig
from weft.api.common.v1 import chat_pb2
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.values.media_types import AUDIO_FORMATS, audio_type_of, image_type_of, shown_type

MAX_IMAGE_STEPS = 60_000
"""Maximum chunks, segments or blocks read of one image, about 30 ms. A GIF of 10 MiB has 42,000 full blocks."""


@dataclass(frozen=True, slots=True)
class ImageSize:
    """The size in an image's header; counting `frames` stops above the given maximum."""

    width: int
    height: int
    frames: int = 1


_BMP_INFO_SIZES = frozenset({12, 40, 52, 56, 64, 108, 124})
# Start of frame, without the markers of tables (C4, CC) and the reserved marker (C8).
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_STANDALONE = frozenset({0x01, *range(0xD0, 0xD8)})
_JPEG_SCAN = 0xDA


def size_of(data: bytes, media_type: str, max_frames: int) -> ImageSize | None:
    """Returns the size of an image of this type; None: invalid header. Stops counting frames above `max_frames`."""
    try:
        return _READERS[media_type](data, max_frames)
    except (struct.error, IndexError):
        return None


def _png(data: bytes, max_frames: int) -> ImageSize | None:
    if data[12:16] != b"IHDR" or data[8:12] != b"\x00\x00\x00\x0d":
        return None
    width, height = struct.unpack_from(">II", data, 16)
    frames, counted, position = 1, 0, 33
    for _ in range(MAX_IMAGE_STEPS):
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
    for _ in range(MAX_IMAGE_STEPS):
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
    for _ in range(MAX_IMAGE_STEPS):
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
            # A frame may exceed the canvas; decoders then enlarge it.
            width, height = max(width, left + across), max(height, top + down)
            in_blocks, position = True, position + 11 + _colours(local)
        else:
            break
    else:
        return None
    return ImageSize(width, height, frames) if frames else None


def _colours(flags: int) -> int:
    """Returns the size of a color table in bytes, from its flags."""
    return 3 * 2 ** ((flags & 7) + 1) if flags & 0x80 else 0


def _webp(data: bytes, max_frames: int) -> ImageSize | None:
    size: ImageSize | None = None
    frames, position = 0, 12
    for _ in range(MAX_IMAGE_STEPS):
        if position + 8 > len(data) or frames > max_frames:
            break
        kind, length = struct.unpack_from("<4sI", data, position)
        if kind == b"ANMF":
            frames += 1
        elif kind in _WEBP_SIZES:
            found = _WEBP_SIZES[kind](data, position + 8)
            if found is None:
                return None
            # A canvas comes first; the size of a frame may differ from it.
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
    # Top-down bitmaps have a negative height.
    return ImageSize(width, abs(height))


_WEBP_SIZES: Mapping[bytes, Callable[[bytes, int], ImageSize | None]] = {b"VP8X": _vp8x, b"VP8 ": _vp8, b"VP8L": _vp8l}
_READERS: Mapping[str, Callable[[bytes, int], ImageSize | None]] = {
    "image/png": _png,
    "image/jpeg": _jpeg,
    "image/gif": _gif,
    "image/webp": _webp,
    "image/bmp": _bmp,
}


MAX_STEPS = 10_000
"""Maximum number of RIFF chunks read of one recording."""

_UNKNOWN_FROM = 0x7FFF_F000
"""Programs that write to a pipe do not know the length in advance: SoX writes this, arecord 2^31, ffmpeg 2^32 - 1."""
# kbit/s by the header's four bits, for MPEG 1 and for MPEG 2 and 2.5; 0 and 15 are invalid.
_RATES_1 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_RATES_2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
# Hz by version (3: MPEG 1, 2: MPEG 2, 0: MPEG 2.5) and the header's two bits.
_SAMPLE_RATES = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}
_LAYER_III = 1


def wav_seconds(data: bytes) -> float | None:
    """Returns the duration of a WAV; None: another file, or no sound."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return None
    position, bytes_per_second = 12, 0
    for _ in range(MAX_STEPS):
        if position + 8 > len(data):
            return None
        kind, length = struct.unpack_from("<4sI", data, position)
        position += 8
        if kind == b"fmt ":
            bytes_per_second = _wav_rate(data, position)
        elif kind == b"data":
            here = len(data) - position
            sound = here if length == 0 or length >= _UNKNOWN_FROM else length
            return sound / bytes_per_second if bytes_per_second and 0 < sound <= here else None
        position += length + (length & 1)
    return None


def _wav_rate(data: bytes, position: int) -> int:
    if position + 16 > len(data):
        return 0
    channels, sample_rate, rate, block = struct.unpack_from("<HIIH", data, position + 2)
    # A decoder may count samples or bytes: both must give the same duration.
    return rate if channels and block and rate == sample_rate * block else 0


def mp3_seconds(data: bytes) -> float | None:
    """Returns the duration of an MP3, assuming the bit rate of its first frame; None: another file."""
    start = _after_tag(data)
    frame = _mp3_frame(data, start)
    if frame is None:
        return None
    length, bits_per_second = frame
    # Four matching bytes may be chance; a second header right after the first frame is not.
    if start + length + 4 <= len(data) and _mp3_frame(data, start + length) is None:
        return None
    return (len(data) - start) * 8 / bits_per_second


def _after_tag(data: bytes) -> int:
    if data[:3] != b"ID3" or len(data) < 10:
        return 0
    size = 0
    for byte in data[6:10]:
        size = size << 7 | byte & 0x7F
    return 10 + size + (10 if data[5] & 0x10 else 0)


def _mp3_frame(data: bytes, position: int) -> tuple[int, int] | None:
    """Returns the length in bytes and the rate in bit/s of the frame at `position`; None: no valid frame."""
    if position + 4 > len(data):
        return None
    word = int.from_bytes(data[position : position + 4])
    version, layer = word >> 19 & 3, word >> 17 & 3
    rate_index, sample_index, padding = word >> 12 & 15, word >> 10 & 3, word >> 9 & 1
    if word >> 21 != 0x7FF or version == 1 or layer != _LAYER_III:
        return None
    if rate_index in {0, 15} or sample_index == 3:
        return None
    rate = 1000 * (_RATES_1 if version == 3 else _RATES_2)[rate_index]
    samples = 144 if version == 3 else 72
    return samples * rate // _SAMPLE_RATES[version][sample_index] + padding, rate


def checked_image(data: bytes, field: str, config: MediaConfig) -> chat_pb2.MediaPart:
    """Returns a validated image under the type of its bytes: browsers, screenshots and MCP servers name others.

    Raises INVALID_ARGUMENT naming `field`.
    """
    media_type = image_type_of(data)
    if media_type is None:
        raise invalid_field(field, f"must be a PNG, JPEG, GIF, WebP or BMP image; its content is {shown_type(data)}")
    _require_size(data, media_type, field, config)
    return chat_pb2.MediaPart(data=data, media_type=media_type)


def checked_audio(data: bytes, field: str, config: MediaConfig) -> chat_pb2.MediaPart:
    """Returns a validated recording under the type of its bytes. Raises INVALID_ARGUMENT naming `field`.

    A WAV or MP3 must be complete. The duration of other types is known only to the engine.
    """
    media_type = audio_type_of(data)
    if media_type is None:
        raise invalid_field(field, f"must be a {AUDIO_FORMATS} recording; its content is {shown_type(data)}")
    if (seconds_of := _DURATIONS.get(media_type)) is not None:
        seconds = seconds_of(data)
        if seconds is None:
            raise invalid_field(field, f"is not a complete {media_type} file")
        if seconds > config.max_audio_seconds:
            raise invalid_field(
                field, f"is longer than {config.max_audio_seconds:g} seconds (gateway.media.max_audio_seconds)"
            )
    return chat_pb2.MediaPart(data=data, media_type=media_type)


_DURATIONS: Mapping[str, Callable[[bytes], float | None]] = {"audio/wav": wav_seconds, "audio/mpeg": mp3_seconds}


def _require_size(data: bytes, media_type: str, field: str, config: MediaConfig) -> None:
    size = size_of(data, media_type, config.max_frames)
    if size is None or size.width < 1 or size.height < 1:
        raise invalid_field(field, f"is not a complete {media_type} file")
    if size.frames > config.max_frames:
        raise invalid_field(field, f"has more than {config.max_frames} frames")
    if size.width * size.height * size.frames > config.max_pixels:
        raise invalid_field(
            field,
            f"has {size.width} x {size.height} pixels in {size.frames} frame(s), more than {config.max_pixels} "
            "(gateway.media.max_pixels)",
        )
