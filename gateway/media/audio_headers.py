"""The length of a recording by its header, without decoding it: WAV (RIFF) and MP3 (MPEG 1, 2 and 2.5, layer III)."""

import struct

MAX_STEPS = 10_000
"""Chunks looked at in one file."""

_UNKNOWN_LENGTHS = frozenset({0, 0xFFFFFFFF})
# kbit/s by the four bits of the header; 0 and 15 are no rates.
_RATES_1 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_RATES_2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
# Hz by version (3: MPEG 1, 2: MPEG 2, 0: MPEG 2.5) and the two bits of the header.
_SAMPLE_RATES = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}
_LAYER_III = 1


def wav_seconds(data: bytes) -> float | None:
    """How long a WAV plays; None for a file that is none, or that holds no sound."""
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
            # Programs that write to a pipe do not know the length beforehand.
            sound = here if length in _UNKNOWN_LENGTHS else length
            return sound / bytes_per_second if bytes_per_second and 0 < sound <= here else None
        position += length + (length & 1)
    return None


def _wav_rate(data: bytes, position: int) -> int:
    if position + 16 > len(data):
        return 0
    channels, sample_rate, rate, block = struct.unpack_from("<HIIH", data, position + 2)
    # The length must be what a reader finds that counts samples, and one that counts bytes.
    return rate if channels and block and rate == sample_rate * block else 0


def mp3_seconds(data: bytes) -> float | None:
    """How long an MP3 plays at the rate of its first frame; None for a file that is none."""
    start = _after_tag(data)
    frame = _mp3_frame(data, start)
    if frame is None:
        return None
    length, bits_per_second = frame
    # One header may be chance: four bytes that are not audio. A second one where the first ends is none.
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
    """Length in bytes and rate in bit/s of the frame at `position`."""
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
