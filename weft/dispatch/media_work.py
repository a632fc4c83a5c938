"""Estimates the work of an image, transcription or speech request from its payload, without decoding media. Pure.

The estimates order queues and predict waits. Tenants are charged for the measured accelerator time, so a false file
header gains nothing.
"""

import re

from weft.api.common.v1 import audio_pb2, image_pb2

DEFAULT_STEPS = 30
"""Image steps if the request specifies none: usual for models that are not distilled."""
DEFAULT_PIXELS = 1024 * 1024
"""Pixels of an image if the request specifies no size."""
MEGAPIXEL = 1_000_000
MAX_WORK = 1e9
"""Maximum work of one request, in any unit."""
COMPRESSED_BYTES_PER_SECOND = 16_000.0
"""Assumed for a recording without a usable header: MP3 of 128 kbit/s."""
MIN_BYTES_PER_SECOND = 500.0
"""Lower than any speech codec: a header that implies less is ignored."""
MAX_BYTES_PER_SECOND = 8 * 192_000 * 4.0
"""Eight channels of 192 kHz in 32 bits: a header that implies more is ignored."""
MAX_HEADER_BYTES = 64 * 1024
"""How much of a file is searched for its header."""
_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
_MP3_KBITS = {
    3: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    2: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
"""Layer III bit rates in kbit/s by header index, for MPEG 1 (3) and for MPEG 2 and 2.5 (2)."""
_MPEG_1, _RESERVED, _LAYER_3 = 3, 1, 1


def work_of(payload: object) -> float:
    """Returns the work of a payload: steps times megapixels of all images, seconds of audio, or characters.

    0: its work is counted in tokens, or not counted.
    """
    match payload:
        case image_pb2.ImagePayload():
            work = _steps(payload) * max(1, payload.count) * _pixels(payload) / MEGAPIXEL
        case audio_pb2.TranscriptionPayload():
            work = recording_seconds(payload.audio.data)
        case audio_pb2.SpeechPayload():
            work = float(len(payload.input))
        case _:
            return 0.0
    return min(work, MAX_WORK)


def recording_seconds(data: bytes) -> float:
    """Estimates the length of a recording: from its header (WAV, FLAC, MP3), else from its size."""
    if not data:
        return 0.0
    head = data[:MAX_HEADER_BYTES]
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
        seconds = _wav_seconds(head, len(data))
    elif head[:4] == b"fLaC":
        seconds = _flac_seconds(head)
    else:
        seconds = _mp3_seconds(head, len(data))
    if seconds is None:
        seconds = len(data) / COMPRESSED_BYTES_PER_SECOND
    return min(max(seconds, len(data) / MAX_BYTES_PER_SECOND), len(data) / MIN_BYTES_PER_SECOND)


def _steps(payload: image_pb2.ImagePayload) -> float:
    return float(max(1, payload.steps)) if payload.HasField("steps") else DEFAULT_STEPS


def _pixels(payload: image_pb2.ImagePayload) -> float:
    match = _SIZE.fullmatch(payload.size)
    return DEFAULT_PIXELS if match is None else float(int(match[1]) * int(match[2]))


def _wav_seconds(head: bytes, size: int) -> float | None:
    """File size divided by the byte rate of the `fmt ` chunk: the length of the data chunk may not be set yet."""
    index = head.find(b"fmt ", 12)
    if index < 0 or index + 20 > len(head):
        return None
    per_second = int.from_bytes(head[index + 16 : index + 20], "little")
    return (size - index) / per_second if per_second else None


def _flac_seconds(head: bytes) -> float | None:
    """Samples divided by sample rate, from the STREAMINFO block, which is always first. 0 samples: unknown."""
    if len(head) < 26:
        return None
    packed = int.from_bytes(head[18:26], "big")
    rate, samples = packed >> 44, packed & (2**36 - 1)
    return samples / rate if rate and samples else None


def _mp3_seconds(head: bytes, size: int) -> float | None:
    """Returns the length by the bit rate of the first frame, which is roughly the average of a variable rate."""
    start = 0
    if head[:3] == b"ID3" and len(head) > 10:
        # Four bytes with seven bits each.
        length = sum((byte & 0x7F) << shift for byte, shift in zip(head[6:10], (21, 14, 7, 0), strict=True))
        start = 10 + length
    for place in _syncs(head, start):
        version, layer = (head[place + 1] >> 3) & 3, (head[place + 1] >> 1) & 3
        index = head[place + 2] >> 4
        if version == _RESERVED or layer != _LAYER_3 or not 0 < index < 15:
            continue
        kbits = _MP3_KBITS[_MPEG_1 if version == _MPEG_1 else 2][index]
        return (size - place) / (kbits * 125)
    return None


def _syncs(head: bytes, start: int) -> list[int]:
    """Returns the offsets of possible frames, which start with eleven set bits."""
    found: list[int] = []
    index = head.find(b"\xff", start)
    while 0 <= index < len(head) - 2 and len(found) < 64:
        if head[index + 1] & 0xE0 == 0xE0:
            found.append(index)
        index = head.find(b"\xff", index + 1)
    return found
